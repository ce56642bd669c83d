"""The importer with complex numbers against PyTorch in complex128, on programs that have nothing to do with SAM 3."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from conformance.support.batches import UNOPTIMIZED, drawn
from conformance.support.complex_programs import EXAMPLES, hold_together, programs
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import run_module
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH
from harness.compiler.lowering.rope import STRATEGIES

CONVERTER = STRATEGIES["converter"]


def as_pairs(x: torch.Tensor) -> np.ndarray:
    """A tensor as the imported program takes it."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.resolve_neg()).contiguous().numpy()


def like(array: np.ndarray, expected: torch.Tensor) -> torch.Tensor:
    """An output of the imported program as PyTorch returns it."""
    tensor = torch.from_numpy(array.copy())
    return torch.view_as_complex(tensor) if expected.is_complex() else tensor


def run_converted(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Imports, compiles and runs; the outputs have PyTorch's dtypes, shapes and order."""
    # torch.export guards the base of a view, which a complex view of real numbers no longer has when it is decomposed
    arguments = tuple(argument.clone() for argument in arguments)
    with torch.no_grad():
        outputs = module(*arguments)
    expected = list(outputs) if isinstance(outputs, tuple) else [outputs]
    imported, parameters = TORCH.import_exported(export_program(module, arguments), CONVERTER)
    arrays = run_module(imported, [*map(as_pairs, arguments), *parameters.values()], UNOPTIMIZED)
    results = [like(array, output) for array, output in zip(arrays, expected, strict=True)]
    assert [(r.dtype, r.shape) for r in results] == [(e.dtype, e.shape) for e in expected]
    return results


def test_random_programs() -> None:
    chosen = drawn(programs(), 15)
    assert len(chosen) == 15
    hold_together(run_converted, chosen)


def test_programs_as_people_write_them() -> None:
    hold_together(run_converted, EXAMPLES.values())


class Lazy(torch.nn.Module):
    """Conjugates that PyTorch only marks, among parameters, buffers and constants, and a negation of that kind."""

    def __init__(self) -> None:
        super().__init__()
        value = torch.tensor([1 + 2j, 3 - 1j])
        self.parameter = torch.nn.Parameter(value.conj(), requires_grad=False)
        self.register_buffer("buffer", value.conj() * 2, persistent=False)
        self.constant = value.conj()
        self.single = torch.tensor(1 - 3j).conj()

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return z * self.parameter + self.buffer, self.constant * self.single, z.conj().imag, (z.conj() * 1j).real


@pytest.mark.smoke
def test_conjugates_that_are_only_marked() -> None:
    module, z = Lazy(), torch.tensor([0.5 - 1j, 2 + 0.25j])
    for actual, expected in zip(run_converted(module, (z,)), module(z), strict=True):
        torch.testing.assert_close(actual, expected.resolve_conj().resolve_neg(), rtol=1e-6, atol=1e-6)


class Extreme(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x / y, x.abs(), x.angle(), 1 / y


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_no_overflow_where_the_result_has_none(dtype: torch.dtype) -> None:
    """Squares of these parts are outside the range of the dtype."""
    largest = torch.finfo(dtype).max
    sizes = torch.tensor([1.0, largest / 8, 8 / largest], dtype=torch.float64)
    turns = torch.polar(torch.ones(8, dtype=torch.float64), torch.arange(8, dtype=torch.float64) * (math.pi / 4) + 0.1)
    x = (sizes[:, None] * turns).to(dtype)
    y = (sizes[:, None] * turns.flip(0)).to(dtype)
    wide_x, wide_y = x.to(torch.complex128), y.to(torch.complex128)
    # PyTorch's own division in complex128 overflows for such values of complex128: angles and moduli are exact enough
    quotient = torch.polar(wide_x.abs() / wide_y.abs(), wide_x.angle() - wide_y.angle())
    inverse = torch.polar(1 / wide_y.abs(), -wide_y.angle())
    expected = (quotient, wide_x.abs(), wide_x.angle(), inverse)
    for actual, wanted in zip(run_converted(Extreme(), (x, y)), expected, strict=True):
        assert bool(((actual - wanted).abs() <= 16 * torch.finfo(dtype).eps * wanted.abs()).all())


class SpecialValues(torch.nn.Module):
    def forward(self, z: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return z.abs(), z / zero, z.exp()


def test_zeros_infinities_and_nan() -> None:
    inf, nan = math.inf, math.nan
    z = torch.tensor([0j, 1 + 0j, complex(inf, 1), complex(1, -inf), complex(inf, inf), complex(nan, 1), 1000 + 0j])
    length, quotient, exponential = run_converted(SpecialValues(), (z, torch.zeros(7, dtype=z.dtype)))
    torch.testing.assert_close(length, z.abs(), equal_nan=True)
    assert torch.view_as_real(quotient).isnan().tolist()[:2] == [[True, True], [False, True]]
    assert quotient[1].real == inf
    assert exponential[0] == 1 and exponential[6] == complex(inf, 0)


class Inverse(torch.nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        w = z * 2
        return torch.erfinv(w.real) + w.acosh()


def test_an_unknown_operator_is_named_with_the_line_of_the_model() -> None:
    lines, first = inspect.getsourcelines(Inverse)
    (line,) = (first + i for i, text in enumerate(lines) if "acosh" in text)
    program = export_program(Inverse(), (torch.ones(3, dtype=torch.complex64),))
    with pytest.raises(NotImplementedError) as raised:
        TORCH.import_exported(program, CONVERTER)
    message = str(raised.value)
    assert message.startswith("aten.acosh.default has no rule for complex tensors, called at ")
    assert f"{__file__}:{line} in forward: `return torch.erfinv(w.real) + w.acosh()`" in message
    assert "erfinv" not in message.split(":")[0]


class RealUnknown(torch.nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return torch.special.i1e(z.real)


def test_an_unknown_real_operator_is_named_by_tvm() -> None:
    with pytest.raises(AssertionError, match=r"Unsupported function types \['special_i1e\.default'\]"):
        TORCH.import_exported(export_program(RealUnknown(), (torch.ones(3, dtype=torch.complex64),)), CONVERTER)


class Half(torch.nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z.clone()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_precision_is_rejected_as_before() -> None:
    with pytest.raises(NotImplementedError, match=r"input_type torch\.complex32 is not handled yet"):
        TORCH.import_exported(export_program(Half(), (torch.ones(3, dtype=torch.complex32),)), CONVERTER)


def test_complex_tensors_are_pairs_in_the_imported_program() -> None:
    module, z = Lazy(), torch.tensor([0.5 - 1j, 2 + 0.25j])
    imported, parameters = TORCH.import_exported(export_program(module, (z,)), CONVERTER)
    main = imported["main"]
    assert [tuple(map(int, parameter.ty.shape)) for parameter in main.params] == [(2, 2)] * 4
    assert {name: value.tolist() for name, value in parameters.items()} == {
        "parameter": [[1, -2], [3, 1]],
        "buffer": [[2, -4], [6, 2]],
        "constant": [[1, -2], [3, 1]],
    }
    assert int(main.attrs["num_input"]) == 1


def test_programs_without_complex_numbers_are_imported_as_ever() -> None:
    program = export_program(torch.nn.Linear(3, 2).eval(), (torch.ones(4, 3),))
    ours, _ = TORCH.import_exported(program, CONVERTER)
    plain, _ = TORCH.import_exported(program, STRATEGIES["real"])
    assert ours.script() == plain.script()
