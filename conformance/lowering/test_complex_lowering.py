"""The general pass from complex to real arithmetic, and SAM 3's attentions through it.

Results are held to complex128 (or to float64, or to mpmath) by rounding bounds, which `complex_programs` derives; the
lowered programs run in PyTorch and in TVM. u is half of the dtype's eps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from conformance.support.batches import UNOPTIMIZED, Part, drawn, listed, run_together
from conformance.support.complex_programs import EXAMPLES, OPERATIONS, Program, assert_within, hold_together, programs
from conformance.support.examples import examples
from conformance.support.function_module import FunctionModule
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import run_module
from harness.compiler.lowering.frontends.torch_export.complex import (
    ComplexOperatorError,
    as_real,
    lower_complex,
)
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.lowering.frontends.torch_export.lifting import decompose_and_lift
from harness.compiler.lowering.rope import STRATEGIES

LOWERING = STRATEGIES["lowering"]
PROMISED = {
    *("polar", "view_as_complex", "view_as_real", "complex", "real", "imag", "conj", "abs", "angle", "exp"),
    *("add", "sub", "mul", "div", "neg", "mm", "einsum", "sum", "mean", "reshape", "view", "permute", "transpose"),
    *("expand", "repeat", "cat", "stack", "index", "select", "slice", "where", "unsqueeze", "squeeze", "clone"),
    "dtype and device moves",
}
U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def as_complex(value: torch.Tensor) -> torch.Tensor:
    """Returns a real tensor [..., 2] as a complex tensor [...]."""
    return torch.view_as_complex(value.contiguous())


def complex_outputs(program: ExportedProgram) -> tuple[bool, ...]:
    """Returns, for each user output of a program in order, whether it is a complex tensor."""
    (output,) = program.graph.find_nodes(op="output")
    specs = program.graph_signature.output_specs
    return tuple(
        isinstance(node, torch.fx.Node) and isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].is_complex()
        for node, spec in zip(output.args[0], specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    )


def complex_call(program: ExportedProgram, lowered: ExportedProgram) -> Callable[..., Any]:
    """Returns a function that runs a lowered program in PyTorch, with the arguments and results of the original one.

    Args:
        program: The program with complex tensors.
        lowered: The result of `lower_complex`.
    """
    module, is_complex = lowered.module(), complex_outputs(program)

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(as_real, (args, kwargs))
        results, structure = pytree.tree_flatten(module(*args, **kwargs))
        changed = [as_complex(r) if complex_ else r for r, complex_ in zip(results, is_complex, strict=True)]
        return pytree.tree_unflatten(changed, structure)

    return call


@torch.no_grad()
def in_pytorch(module: torch.nn.Module, args: tuple) -> list[torch.Tensor]:
    program = export_program(module, args)
    return listed(complex_call(program, lower_complex(program))(*args))


def in_tvm(module: torch.nn.Module, args: tuple) -> list[torch.Tensor]:
    """Lowered, compiled and run; takes and returns complex tensors."""
    program = export_program(module, args)
    is_complex = complex_outputs(program)
    lowered, parameters = import_program(LOWERING.transform(program))
    arrays = [as_real(arg).contiguous().numpy() for arg in args]
    results = map(torch.from_numpy, run_module(lowered, [*arrays, *parameters.values()], UNOPTIMIZED))
    return [as_complex(r) if c else r for r, c in zip(results, is_complex, strict=True)]


EITHER = pytest.mark.parametrize("run", [in_pytorch, in_tvm])


def operators(program: torch.export.ExportedProgram) -> Counter[str]:
    """How often each operator is called."""
    return Counter(
        str(node.target).removeprefix("aten.").split(".")[0]
        for node in program.graph.nodes
        if node.op == "call_function" and "_assert_tensor_metadata" not in str(node.target)
    )


def complex_leftovers(program: torch.export.ExportedProgram) -> list[str]:
    held = {**program.state_dict, **program.constants}
    return [
        node.name
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_complex()
    ] + [name for name, value in held.items() if isinstance(value, torch.Tensor) and value.is_complex()]


# The programs themselves.


def test_programs_are_made_of_every_promised_operator():
    assert {operation.listed for operation in OPERATIONS.values()} >= PROMISED


@examples(200)
@given(programs())
@torch.no_grad()
def test_pytorch_is_within_the_bounds(program: Program):
    assert_within(program.module()(*program.arguments()), program.expected())


@examples(50)
@given(programs())
@torch.no_grad()
def test_a_conjugated_result_is_outside_the_bounds(program: Program):
    expected = program.expected()
    wrong = [want.value.conj() for want in expected]
    assume(any(bool((2 * want.value.imag.abs() > want.error).any()) for want in expected if want.value.is_complex()))
    with pytest.raises(AssertionError, match="times the rounding bound"):
        assert_within(wrong, expected)


# Lowered programs.


PER_OPERATION, ANY, AT_ONCE = 2, 30, 10
"""How many programs are drawn that begin with each operator and how many of any kind, and how many share a build."""


@pytest.mark.parametrize("first", range(0, len(OPERATIONS), AT_ONCE), ids=[*OPERATIONS][::AT_ONCE])
def test_drawn_programs_lowered_in_pytorch(first: int):
    names = [*OPERATIONS][first : first + AT_ONCE]
    chosen = [program for name in names for program in drawn(programs(first=name), PER_OPERATION)]
    assert [program.steps[0].operation for program in chosen] == [n for n in names for _ in range(PER_OPERATION)]
    hold_together(in_pytorch, chosen)


def test_drawn_programs_lowered_in_tvm():
    chosen = drawn(programs(), ANY)
    assert len(chosen) == ANY
    for first in range(0, ANY, AT_ONCE):
        hold_together(in_tvm, chosen[first : first + AT_ONCE])


@EITHER
def test_examples(run):
    hold_together(run, EXAMPLES.values())


def test_nothing_complex_is_left_and_the_original_is_untouched():
    for example in EXAMPLES.values():
        program = export_program(example.module(), example.arguments())
        before, complex_before = str(program.graph), complex_leftovers(program)
        lowered = lower_complex(program)
        assert complex_leftovers(lowered) == []
        assert complex_leftovers(program) == complex_before != []
        assert str(program.graph) == before


def test_a_real_program_is_returned_as_it_is():
    program = export_program(FunctionModule(lambda x: x.exp() + 1), (torch.randn(3),))
    assert lower_complex(program) is program


# Beside the promised operators: what core ATen makes of PyTorch's functions on complex tensors.


def _assigned(z: torch.Tensor) -> torch.Tensor:
    z = z.clone()
    z[1] = z.real[0]
    z[:, 1:] *= 2j
    z.imag[2] = 3.0
    return z


INDEX = torch.tensor([[0, 2, 1]])
FURTHER = {
    "flip": lambda z: z.flip(0),
    "roll": lambda z: z.roll(1, 0),
    "tril": lambda z: z.tril() + z.triu(1),
    "diagonal": lambda z: z.diagonal(),
    "cumsum": lambda z: z.cumsum(1),
    "gather": lambda z: z.gather(0, INDEX),
    "index_select": lambda z: z.index_select(1, INDEX[0]),
    "index_put": lambda z: z.index_put((INDEX[0],), z[0] * 1j),
    "masked_fill": lambda z: z.masked_fill(z.real > 0, 2 - 1j),
    "pad": lambda z: torch.nn.functional.pad(z, (1, 2), value=0.5),
    "assignment": _assigned,
    "split": lambda z: z.split([1, 2])[1],
    "unbind": lambda z: z.unbind(1)[2] - z.unbind(1)[0],
    "chunk": lambda z: z.chunk(3, 1)[1],
    "adjoint": lambda z: z.H @ z,
    "imag_of_conj": lambda z: z.conj().imag,
    "matrix_vector": lambda z: z @ z[0],
    "addmm": lambda z: torch.addmm(z, z, z, beta=2j, alpha=0.5 - 1j),
    "baddbmm": lambda z: torch.baddbmm(z[None], z[None], z[None], beta=0.5),
    "linear": lambda z: torch.nn.functional.linear(z, z, z[0]),
    "reciprocal": lambda z: z.reciprocal(),
    "equal": lambda z: (z == z.conj()) | (z != z.real) | (z == 1j),
    "to_bool": lambda z: (z * 0).to(torch.bool),
    "to_real": lambda z: torch.view_as_real(z).to(torch.float32),
    "zeros_like": lambda z: torch.zeros_like(z) + torch.full_like(z, 1 - 2j),
    "ones_like_real": lambda z: torch.ones_like(z, dtype=torch.float64),
    "new_zeros": lambda z: z.new_zeros(3) + z,
    "complex_constant": lambda z: z * torch.tensor([1j, 2.0, 0.0]),
    "real_of_real": lambda z: torch.real(z.abs()) + z.abs().conj(),
    "sum_to_other_dtype": lambda z: z.sum(0, dtype=torch.complex64).to(z.dtype) * 0 + z.real.sum(dtype=z.dtype),
    "broadcast_sum": lambda z: z[:1] + z.real + (z.imag - z[0]),
    "broadcast_complex": lambda z: torch.complex(z.real[:1], z.imag[:, :1]),
    "pure_imaginary": lambda z: z.real * 1j - 2j * z,
    "over_imaginary": lambda z: z / 2j + z.real / (1 - 3j),
    "real_over_complex": lambda z: z.real / z,
    "angle_of_real": lambda z: z.real.to(z.dtype).angle() + z.real.to(z.dtype).abs(),
    "exp_of_real": lambda z: z.real.to(z.dtype).exp(),
    "polar_of_parts": lambda z: torch.polar(torch.view_as_real(z)[..., 0], torch.view_as_real(z)[..., 1]),
    "broadcast": lambda z: torch.broadcast_tensors(z, z[:1])[1] * z[:, :1].expand_as(z),
}


SQUARE = torch.randn(3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def further() -> dict[str, list[torch.Tensor]]:
    """What each function returns for `SQUARE`, lowered."""
    parts = [Part(name, FunctionModule(function), (SQUARE.clone(),)) for name, function in FURTHER.items()]
    return dict(zip(FURTHER, run_together(in_pytorch, parts), strict=True))


@pytest.mark.parametrize("name", FURTHER)
@torch.no_grad()
def test_further_functions(further, name: str):
    """In complex128, against PyTorch's own; three by three entries cost far less than 100 u of the largest value."""
    expected = FURTHER[name](SQUARE.clone())
    (actual,) = further[name]
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, expected = actual.to(torch.complex128), expected.to(torch.complex128)
    assert (actual - expected).abs().max() <= 100 * U[torch.float64] * expected.abs().max()


def test_indexing_with_a_mask():
    z, mask = torch.randn(4, 3, dtype=torch.complex64), torch.tensor([True, False, True, True])
    torch.testing.assert_close(in_pytorch(FunctionModule(lambda z, mask: z[mask] * 1j), (z, mask))[0], z[mask] * 1j)


@torch.no_grad()
def test_dynamic_shapes():
    module = FunctionModule(lambda z: torch.view_as_real(z * z.conj() + z.abs().sum(0)))
    count = torch.export.Dim("count", min=2, max=9)
    z = torch.randn(4, 3, dtype=torch.complex64)
    program = torch.export.export(module, (z,), dynamic_shapes=(({0: count},),), strict=False)
    call = complex_call(program, lower_complex(program))
    for size in (2, 4, 9):
        z = torch.randn(size, 3, dtype=torch.complex64)
        torch.testing.assert_close(call(z), module(z))


def test_float64_matrix_products_keep_their_digits():
    """What the workaround of `matmul_float32` and `addmm_float64` promises, beyond their reproductions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 3, dtype=torch.float64, generator=generator)
    z = x.to(torch.complex128) * (1 + 0.5j)
    forms = {
        "products": lambda x, z: (x @ x, x[0] @ x[1], z @ z, z[0] @ x[1].to(z.dtype)),
        "sums": lambda x, z: tuple(
            torch.addmm(x[0, 0], x[0], x[1], beta=beta, alpha=alpha)
            for beta, alpha in ((1, 1), (0.5, -2.0), (0, 2.0), (3.0, 0), (0, 0))
        ),
    }
    for form in forms.values():
        for actual, expected in zip(in_tvm(FunctionModule(form), (x, z)), form(x, z), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


# Errors.


def _error_of(module: torch.nn.Module, *args: torch.Tensor) -> str:
    program = export_program(module, args)
    with pytest.raises(ComplexOperatorError) as caught:
        lower_complex(program)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


class Unknown(torch.nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        doubled = z * 2
        return torch.linalg.det(doubled)


def test_an_unknown_operator_is_named_with_its_line():
    message = _error_of(Unknown(), torch.randn(2, 2, dtype=torch.complex64))
    assert "linalg_det" in message
    line = Unknown.forward.__code__.co_firstlineno + 2
    assert f"{__file__}:{line} in forward: `return torch.linalg.det(doubled)`" in message


def test_half_precision_complex_is_refused():
    assert "torch.complex32" in _error_of(
        FunctionModule(lambda x: torch.complex(x, x)), torch.ones(2, dtype=torch.float16)
    )


def test_control_flow_over_complex_tensors_is_refused():
    def choose(z: torch.Tensor) -> torch.Tensor:
        return torch.cond(z.real.sum() > 0, lambda z: z * 2j, lambda z: z + 1, (z,))

    assert "control flow" in _error_of(FunctionModule(choose), torch.randn(3, dtype=torch.complex64))


def test_pytorch_cannot_decompose_what_was_exported_with_a_complex_view():
    """Its guard names the base of the argument, which run_decompositions does not have: pass a copy to torch.export."""
    view = torch.view_as_complex(torch.randn(3, 2))
    program = export_program(FunctionModule(lambda z: z * z), (view,))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'size'"):
        lower_complex(program)
    torch.testing.assert_close(in_pytorch(FunctionModule(lambda z: z * z), (view.clone(),))[0], view * view)


# The calling convention.


class Held(torch.nn.Module):
    """A complex parameter, buffers and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("weight_real", torch.randn(3))
        self.register_buffer("count", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("scratch", torch.randn(3, dtype=torch.complex64), persistent=False)
        self.unread = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))

    def forward(self, pair: tuple, *, scale: torch.Tensor) -> dict:
        z, x = pair
        self.count.add_(z)
        return {"both": [z * self.weight + self.weight_real, x], "one": self.count * scale + self.scratch}


@torch.no_grad()
def test_nested_inputs_outputs_and_what_the_module_holds():
    module = Held()
    z, x, scale = torch.randn(3, dtype=torch.complex64), torch.randn(2), torch.randn(3, dtype=torch.complex64)
    program = torch.export.export(module, ((z, x),), {"scale": scale}, strict=False)
    lowered = lower_complex(program)
    assert set(lowered.state_dict) == set(program.state_dict)
    assert torch.equal(lowered.state_dict["weight"], torch.view_as_real(module.weight))
    assert lowered.constants["scratch"].shape == (3, 2)
    assert lowered.example_inputs[0][0][0].shape == (3, 2)
    call, reference = complex_call(program, lowered), program.module()
    for _ in range(2):  # the buffer that forward changes is changed twice
        actual, expected = call((z, x), scale=scale), reference((z, x), scale=scale)
        torch.testing.assert_close(actual["both"][0], expected["both"][0])
        assert torch.equal(actual["both"][1], x)
        torch.testing.assert_close(actual["one"], expected["one"])


@torch.no_grad()
def test_inputs_that_are_changed_and_inputs_that_are_returned():
    def change(z_real: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z.mul_(1j)
        return z_real + z, z_real, torch.view_as_real(z)

    args = torch.randn(3), torch.randn(3, dtype=torch.complex64)
    program = export_program(FunctionModule(change), args)
    call = complex_call(program, lower_complex(program))
    mine, theirs = [tuple(arg.clone() for arg in args) for _ in range(2)]
    for actual, expected in zip(call(*mine), change(*theirs), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(mine[1], theirs[1])


def test_lazily_conjugated_arguments():
    z = torch.randn(2, 3, dtype=torch.complex64)
    program = export_program(FunctionModule(lambda z: z * 2), (z,))
    assert torch.equal(complex_call(program, lower_complex(program))(z.conj()), z.conj() * 2)


# Few operators.


def test_a_round_trip_costs_nothing():
    program = export_program(
        FunctionModule(lambda x: torch.view_as_real(torch.view_as_complex(x)) + 1), (torch.randn(3, 2),)
    )
    assert operators(lower_complex(program)) == Counter(add=1)


def test_a_product_is_two_products_and_a_sum_for_each_part():
    args = torch.randn(4, 3, 2), torch.randn(3, 2)

    def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(table)).flatten(1)

    program = lower_complex(export_program(FunctionModule(rotate), args))
    assert operators(program) == Counter(select=4, mul=4, sub=1, add=1, stack=1, view=1)


def test_a_real_operand_takes_two_products():
    z, x = torch.randn(3, 3, dtype=torch.complex64), torch.randn(3, 3)
    program = lower_complex(
        export_program(FunctionModule(lambda z, x: torch.view_as_real((z * x) @ x.to(z.dtype))), (z, x))
    )
    assert operators(program) == Counter(select=2, mul=2, mm=2, stack=1)


def test_what_depends_on_no_input_is_computed_once():
    def rotate(x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(5.0), 100.0 ** -torch.arange(0, 1, 0.5))
        return torch.view_as_complex(x) * torch.polar(torch.ones_like(angles), angles).repeat(2, 1)

    lowered = lower_complex(export_program(FunctionModule(rotate), (torch.randn(10, 2, 2),)))
    assert operators(lowered) == Counter(select=4, repeat=2, mul=4, sub=1, add=1, stack=1)
    angles = torch.outer(torch.arange(5.0), 100.0 ** -torch.arange(0, 1, 0.5))
    table = torch.polar(torch.ones_like(angles), angles)
    (computed,) = (value for name, value in lowered.constants.items() if name.startswith("computed"))
    assert torch.equal(computed, torch.view_as_real(table))


# Accuracy at every magnitude.


def magnitudes(count: int, exponent: float, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Complex numbers whose parts have magnitudes from 10^−exponent to 10^exponent, each of its own."""
    generator = torch.Generator().manual_seed(seed)
    exponents = (torch.rand(count, 2, generator=generator, dtype=torch.float64) * 2 - 1) * exponent
    signs = torch.randint(0, 2, (count, 2), generator=generator) * 2 - 1
    kind = torch.complex64 if dtype == torch.float32 else torch.complex128
    return torch.view_as_complex(signs * 10.0**exponents).to(kind, copy=True)


def ulp_of(size: torch.Tensor) -> torch.Tensor:
    """The distance to the next float32."""
    size = size.float()
    return torch.nextafter(size, torch.tensor(torch.inf)).double() - size.double()


def one_by_one(z: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return z.abs(), z.angle(), z / w, z * w


@EITHER
def test_float32_parts_from_1e_minus_30_to_1e30(run):
    z, w = (magnitudes(4096, 30, seed, torch.float32) for seed in (0, 1))
    u, tiny = U[torch.float32], 2.0**-148
    length, angle, quotient, _ = run(FunctionModule(one_by_one), (z, w))
    exact_z, exact_w = z.to(torch.complex128), w.to(torch.complex128)
    assert bool(((length.double() - exact_z.abs()).abs() <= 3 * u * exact_z.abs()).all())
    assert bool(((angle.double() - exact_z.angle()).abs() <= 4 * u * exact_z.angle().abs() + tiny).all())
    exact = exact_z / exact_w
    inside = (exact.abs() > 1e-30) & (exact.abs() < 1e30)
    assert int(inside.sum()) > 1000
    assert bool(((quotient.to(torch.complex128) - exact).abs() <= 9 * u * exact.abs())[inside].all())


@EITHER
def test_products_are_within_two_ulp_of_the_larger_of_their_two_products(run):
    """Half a ULP for each product, and half a ULP of a sum that is at most twice the larger product."""
    z, w = magnitudes(4096, 18, 2, torch.float32), magnitudes(4096, 18, 3, torch.float32)
    table = torch.polar(torch.ones(4096), torch.linspace(0, 200, 4096))
    for left, right in ((z, w), (magnitudes(4096, 30, 4, torch.float32), table)):
        (product,) = run(FunctionModule(lambda z, w: z * w), (left, right))
        (a, b), (c, d) = ((x.real.double(), x.imag.double()) for x in (left, right))
        for part, terms in ((product.real, (a * c, -b * d)), (product.imag, (a * d, b * c))):
            ulp = ulp_of(torch.maximum(*(term.abs() for term in terms)))
            assert bool(((part.double() - sum(terms)).abs() <= 2 * ulp).all())


@EITHER
def test_exp_reaches_as_far_as_its_result(run):
    re = torch.linspace(-100, 89.5, 4096)
    z = torch.complex(
        re, torch.linspace(-50, 50, 4096)[torch.randperm(4096, generator=torch.Generator().manual_seed(0))]
    )
    (result,) = run(FunctionModule(torch.exp), (z,))
    exact = z.to(torch.complex128).exp()
    largest = torch.finfo(torch.float32).max
    inside = (exact.real.abs() < largest) & (exact.imag.abs() < largest)
    assert bool((inside & (exact.abs() > largest)).any())  # some have a finite result and an infinite e^re
    bound = 12 * U[torch.float32] * exact.abs() + 2.0**-148
    assert bool(((result.to(torch.complex128) - exact).abs() <= bound)[inside].all())


def test_float64_parts_from_1e_minus_300_to_1e300():
    z, w = (magnitudes(200, 300, seed, torch.float64) for seed in (5, 6))
    length, angle, quotient, _ = in_pytorch(FunctionModule(one_by_one), (z, w))
    u = U[torch.float64]
    held = 0
    with mpmath.workdps(50):
        for i in range(len(z)):
            exact_z, exact_w = (mpmath.mpc(*map(float, torch.view_as_real(x)[i])) for x in (z, w))
            assert abs(mpmath.mpf(length[i].item()) - abs(exact_z)) <= 3 * u * abs(exact_z)
            exact_angle = mpmath.arg(exact_z)
            assert abs(mpmath.mpf(angle[i].item()) - exact_angle) <= 4 * u * abs(exact_angle) + 2.0**-1070
            exact = exact_z / exact_w
            if 1e-300 < abs(exact) < 1e300:
                actual = mpmath.mpc(*map(float, torch.view_as_real(quotient)[i]))
                assert abs(actual - exact) <= 9 * u * abs(exact)
                held += 1
    assert held > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_abs_at_the_ends_of_the_range(dtype):
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    parts = [3 * smallest, 4 * smallest], [limits.max / 2, limits.max / 2], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]
    z = torch.view_as_complex(torch.tensor(parts, dtype=dtype)).clone()
    (length,) = in_pytorch(FunctionModule(torch.abs), (z,))
    assert length[:1].item() == 5 * smallest
    assert length[1].item() == pytest.approx(limits.max / math.sqrt(2), rel=4 * limits.eps)
    assert length[2] == 0 and length[3] == torch.inf and length[4].isnan()


# SAM 3.


@examples(12)
@given(data=st.data())
@torch.no_grad()
def test_upstreams_rotation_lowered(sam3, data):
    """Queries and keys in any dtype, repeated keys, no keys: float32 inside, within 2 ULP of the larger product."""
    head = 4 * data.draw(st.integers(1, 8))
    width, height, repeat = (data.draw(st.integers(low, 4)) for low in (1, 1, 0))
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    source = data.draw(st.sampled_from([sam3.trunk, sam3.tracker_rope]))
    table = source.compute_axial_cis(
        head, width, height, data.draw(st.sampled_from([2.0, 10000.0])), data.draw(st.sampled_from([1 / 3, 1.0])), 2
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    tokens = width * height
    # heads come second, as upstream makes them: not contiguous
    q, k = (
        torch.randn(batch, count, heads, head, generator=generator).to(dtype).transpose(1, 2)
        for count in (tokens, repeat * tokens)
    )
    rotate = FunctionModule(lambda q, k, table: source.apply_rotary_enc(q, k, table, repeat_freqs_k=True))
    wanted = rotate(q, k, table)
    for x, got, want in zip((q, k), in_pytorch(rotate, (q, k, table)), wanted, strict=True):
        assert got.dtype == want.dtype == dtype and got.shape == want.shape
        if x.numel() == 0:
            continue
        a, b = x.float().double().unflatten(-1, (-1, 2)).unbind(-1)
        c, d = (part.double().repeat(x.shape[2] // tokens, 1) for part in (table.real, table.imag))
        exact = torch.stack((a * c - b * d, a * d + b * c), -1).flatten(-2)
        larger = torch.stack(
            (torch.maximum((a * c).abs(), (b * d).abs()), torch.maximum((a * d).abs(), (b * c).abs())), -1
        )
        larger = larger.flatten(-2).float()
        ulp = torch.nextafter(larger, torch.tensor(torch.inf)).double() - larger.double()
        stored = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        bound = 2 * ulp + (0 if dtype in (torch.float32, torch.float64) else stored)
        assert bool(((got.double() - exact).abs() <= bound).all())


def test_the_trunk_gets_the_operators_of_the_real_strategy(sam3):
    """But for the parts of the table, which are taken when the model is loaded, and one reshape of each."""
    options = {"use_rope": True, "input_size": (6, 6), "rope_pt_size": (2, 2), "rope_interp": True}
    attention, x = sam3.trunk.Attention(32, 4, **options).eval(), torch.randn(1, 6, 6, 32)
    counts = {}
    for name in ("real", "lowering"):
        strategy = STRATEGIES[name]
        with strategy.apply(attention):
            counts[name] = operators(decompose_and_lift(strategy.transform(export_program(attention, (x,)))))
    assert counts["lowering"] - counts["real"] == Counter(select=2, view=2)
    assert counts["real"] - counts["lowering"] == Counter()


def test_results_do_not_depend_on_the_order_of_the_tables():
    """Parameters come back by name, in the order in which the imported function takes them."""
    module = Held()
    z, x, scale = torch.randn(3, dtype=torch.complex64), torch.randn(2), torch.randn(3, dtype=torch.complex64)
    call = FunctionModule(lambda z, x, scale: z * module.weight.detach() + module.scratch * scale)
    (actual,) = in_tvm(call, (z, x, scale))
    np.testing.assert_allclose(actual.numpy(), call(z, x, scale).numpy(), rtol=1e-6)
