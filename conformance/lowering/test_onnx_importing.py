"""What the frontend onnx promises: inputs, parameters, outputs, complex numbers, errors."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest
import torch

from conformance.support.function_module import FunctionModule
from conformance.support.sentences import sentence
from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.lowering.frontends.onnx import exporting
from harness.compiler.lowering.frontends.onnx.exporting import export_module
from harness.compiler.lowering.frontends.onnx.importing import import_exported, import_module
from harness.compiler.lowering.frontends.running import run_module, run_repaired, run_torch
from harness.compiler.lowering.rope import STRATEGIES
from harness.core.errors import HarnessError


class Everything(torch.nn.Module):
    """Weights, buffers, constants, and some of each that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.unread = torch.nn.Linear(2, 2)
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("unread_buffer", torch.arange(7.0))
        self.register_buffer("table", torch.arange(3.0) * 2, persistent=False)
        self.turned = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).T, requires_grad=False)

    def forward(self, input: torch.Tensor, ignored: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.linear(input) * self.turned + self.kept + self.table + torch.tensor(2.0)
        return torch.where(mask, x, 0.0), input, self.kept, ignored + 1, ~mask, x.reshape(3, 2)


@pytest.fixture
def module() -> Everything:
    torch.manual_seed(0)
    return Everything().eval()


@pytest.fixture
def args() -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 3), torch.zeros(4, dtype=torch.int64), torch.tensor([[True], [False]])


def test_inputs_come_first_and_parameters_follow(module: Everything, args: tuple[torch.Tensor, ...]) -> None:
    imported, parameters = import_module(module, args)
    main = imported["main"]
    assert int(main.attrs["num_input"]) == 3
    assert [parameter.name for parameter in main.params][:3] == ["input", "ignored", "mask"]
    shapes = [tuple(int(size) for size in parameter.ty.shape) for parameter in main.params]
    dtypes = [str(parameter.ty.dtype) for parameter in main.params]
    assert shapes == [(2, 3), (4,), (2, 1), *(value.shape for value in parameters.values())]
    assert dtypes == ["float32", "int64", "bool", *(str(value.dtype) for value in parameters.values())]
    assert {"linear.weight", "linear.bias", "kept", "table", "turned"} == set(parameters)
    actual = run_module(imported, [*(arg.numpy() for arg in args), *parameters.values()])
    expected = run_torch(module, args)
    assert [array.dtype for array in actual] == [array.dtype for array in expected]
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_values_are_the_modules_own_memory(module: Everything, args: tuple[torch.Tensor, ...]) -> None:
    _, parameters = import_module(module, args)
    for name, value in parameters.items():
        own = attrgetter(name)(module).detach().numpy()
        np.testing.assert_array_equal(value, own)
        assert value.flags.c_contiguous
        assert np.shares_memory(value, own) or not own.flags.c_contiguous


def test_main_is_one_dataflow_block_that_returns_a_tuple() -> None:
    imported, _ = import_module(torch.nn.ReLU(), (torch.ones(2),))
    main = imported["main"]
    assert len(main.ret_ty.fields) == 1
    assert len(main.body.blocks) == 1


def test_an_exported_model_is_not_changed(module: Everything, args: tuple[torch.Tensor, ...]) -> None:
    exported = export_module(module, args)
    first, once = import_exported(exported)
    second, again = import_exported(exported)
    assert first.script() == second.script()
    assert list(once) == list(again)


class Rotated(torch.nn.Module):
    """Rotary position encoding as SAM 3 has it: complex64, on queries without tokens as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(5, 4), torch.rand(5, 4)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(3)


def test_complex_rotation_goes_through() -> None:
    module, args = Rotated(), (torch.randn(1, 2, 5, 8),)
    (actual,), (expected,) = run_repaired(import_module, module, args), run_torch(module, args)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_complex_table_is_a_parameter_of_pairs() -> None:
    module = Rotated()
    _, parameters = import_module(module, (torch.randn(1, 2, 5, 8),))
    assert sum(value.size for value in parameters.values()) == 2 * module.turns.numel()


class Nothing(torch.nn.Module):
    """Results without elements, and one that is concatenated with some."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.permute(1, 0, 2), torch.cat([x.permute(1, 0, 2), y], dim=1), x.sum(0)


def test_tensors_without_elements() -> None:
    module, args = Nothing(), (torch.zeros(0, 2, 3), torch.ones(2, 1, 3))
    for actual, expected in zip(run_repaired(import_module, module, args), run_torch(module, args), strict=True):
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(actual, expected)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=sentence("not-installed", missing="onnx and onnxscript")):
        export_module(torch.nn.ReLU(), (torch.ones(2),))


def test_it_is_registered_with_its_strategies() -> None:
    taken = [name for name, strategy in STRATEGIES.items() if FRONTENDS["onnx"].takes(strategy)]
    assert taken == ["none", "real"]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda x: torch.cummax(x, 0).values,
            r"^aten\.cummax\.default is not known to PyTorch's ONNX exporter, called at .*function_module\.py:\d+",
        ),
        (
            lambda x: x.scatter_reduce(0, x, x, "mean"),
            r"^scatter_reduce with 'mean' is not known to PyTorch's ONNX exporter, called at .*: take a sum",
        ),
    ],
    ids=["an operator", "mean"],
)
def test_what_cannot_be_exported_names_its_line(function: Callable[..., torch.Tensor], sentence: str) -> None:
    with pytest.raises(NotImplementedError, match=sentence):
        export_module(FunctionModule(function), (torch.arange(3),))
