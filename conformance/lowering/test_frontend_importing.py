"""What `export_program` and `import_program` promise: inputs, parameters, outputs, errors."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest
import torch

from conformance.support.function_module import FunctionModule
from conformance.support.operator_calls import (
    Call,
    calls_of,
    dump_calls,
    load_calls,
)
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import run_module, run_torch
from harness.compiler.lowering.frontends.torch_export.importing import import_program


class Everything(torch.nn.Module):
    """Weights, buffers, constants, and some of each that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.unread = torch.nn.Linear(2, 2)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("unread_buffer", torch.arange(7.0))
        self.register_buffer("only_checked", torch.arange(9.0))
        self.register_buffer("table", torch.arange(3.0) * 2, persistent=False)
        self.turned = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).T, requires_grad=False)
        self.constant = torch.tensor([5.0, 6.0, 7.0])

    def forward(
        self, input: torch.Tensor, ignored: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.only_checked.repeat(2).to(torch.float32)  # what export keeps of it is a check of the dtype
        x = self.linear(input) * self.turned + self.kept + self.table + self.constant + torch.tensor(2.0)
        return torch.where(mask, x, 0.0), input, self.kept


@pytest.fixture
def module() -> Everything:
    torch.manual_seed(0)
    return Everything().eval()


@pytest.fixture
def args() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 3), torch.zeros(4, dtype=torch.int64), torch.tensor([[True], [False]])


def test_inputs_come_first_and_parameters_follow(module: Everything, args: tuple[torch.Tensor, ...]) -> None:
    imported, parameters = import_program(export_program(module, args))
    main = imported["main"]
    assert int(main.attrs["num_input"]) == 3
    shapes = [tuple(int(size) for size in parameter.ty.shape) for parameter in main.params]
    dtypes = [str(parameter.ty.dtype) for parameter in main.params]
    assert shapes == [(2, 3), (4,), (2, 1), *(value.shape for value in parameters.values())]
    assert dtypes[:3] == ["float32", "int64", "bool"]
    assert set(parameters) == {"linear.weight", "linear.bias", "kept", "table", "turned", "constant"}
    actual = run_module(imported, [*(arg.numpy() for arg in args), *parameters.values()])
    for got, wanted in zip(actual, run_torch(module, args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_values_belong_to_their_parameters(module: Everything, args: tuple[torch.Tensor, ...]) -> None:
    _, parameters = import_program(export_program(module, args))
    for name, value in parameters.items():
        np.testing.assert_array_equal(value, attrgetter(name)(module).detach().numpy())
        assert value.flags.c_contiguous


def test_program_is_not_changed(module: Everything, args: tuple[torch.Tensor, ...]) -> None:
    program = export_program(module, args)
    before = (str(program.graph), str(program.graph_signature), sorted(program.state_dict))
    import_program(program)
    import_program(program)
    assert before == (str(program.graph), str(program.graph_signature), sorted(program.state_dict))


def test_one_output_is_a_tuple_too() -> None:
    imported, _ = import_program(export_program(torch.nn.ReLU(), (torch.ones(2),)))
    assert len(imported["main"].ret_ty.fields) == 1


def test_gradients_are_not_recorded(module: Everything, args: tuple[torch.Tensor, ...]) -> None:
    assert torch.is_grad_enabled()
    export_program(module, args)
    assert torch.is_grad_enabled()


def test_attention_does_not_take_the_fast_path() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval().requires_grad_(False)
    x = torch.ones(1, 3, 8)
    program = export_program(attention, (x, x, x))
    assert "_native_multi_head_attention" not in str(program.graph)
    assert torch.backends.mha.get_fastpath_enabled() == before


class Rotated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * self.turns)


def test_complex_numbers_are_rejected_by_the_importer() -> None:
    with pytest.raises(NotImplementedError, match=r"^input_type torch\.complex64 is not handled yet$"):
        import_program(export_program(Rotated(), (torch.ones(4, 2),)))


class Unknown(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erfinv(x)


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(AssertionError, match=r"erfinv\.default"):
        import_program(export_program(Unknown(), (torch.zeros(2),)))


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2.0).reshape(2, 2) + torch.zeros(2, 2)


def test_calls_are_listed_with_their_arguments() -> None:
    calls = calls_of(Scaled(), (torch.ones(4),))
    assert Call("aten.mul.Tensor", '[[{"shape": [4], "dtype": "float32"}, 2.0], {}]') in calls
    assert {"aten.mul.Tensor", "aten.view.default"} <= {call.operator for call in calls}


def test_the_list_of_calls_survives_a_round_trip(tmp_path) -> None:
    calls = calls_of(Scaled(), (torch.ones(4),))
    path = tmp_path / "operators.json"
    path.write_text(dump_calls(calls), encoding="utf-8")
    assert set(load_calls(path)) == {call.operator for call in calls}


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda x: 2**x,
            r"aten\.pow\.Scalar of integers is not known to TVM, called at .*function_module\.py:\d+",
        ),
        (lambda x: x**x, r"aten\.pow\.Tensor_Tensor of integers is not known to TVM, called at .*: `.*`: raise floats"),
        (
            lambda x: x.scatter_reduce(0, x, x, "mean"),
            r"^scatter_reduce with 'mean', include_self=True is not known, called at .*: take one of sum, prod",
        ),
    ],
    ids=["a number", "a tensor", "mean"],
)
def test_what_no_workaround_makes_names_its_line(function: Callable[..., torch.Tensor], sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=sentence):
        import_program(export_program(FunctionModule(function), (torch.arange(3),)))


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[:2].add_(1)
        return x + self.calls


@pytest.mark.smoke
def test_a_buffer_that_changes_is_no_constant() -> None:
    with pytest.raises(NotImplementedError, match=r"changes the buffer calls at .*: `self\.calls.*: make it an input"):
        export_program(Counting(), (torch.ones(3),))
