"""Defines complex programs, and the distance by which rounding may move their results, for every complex strategy.

`programs()` draws random compositions of the operators that the strategies promise (`OPERATIONS`), with inputs,
parameters, buffers and constants, mixed with real and integer tensors and Python numbers. `EXAMPLES` are programs as
people write them. Both are used alike:

    module, arguments = program.module(), program.arguments()
    expected = program.expected()       # complex128 or float64 values, and a bound on the error of each element
    assert_within(actual, expected)     # actual: what the strategy computed, complex tensors where PyTorch returns them

The bound is a running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3): beside every
value z it carries e with |computed − z| ≤ e, in the modulus of complex numbers. Each operator propagates the errors of
its operands by its own condition and adds its rounding, in units of u = eps/2 of the narrowest dtype in the program.
The constants hold for any sensible real arithmetic; they are derived beside each operator. A program is drawn so that
every intermediate value is finite and its bound small, hence a wrong result cannot hide behind a large bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from conformance.support.batches import Part, Run, run_together

LARGEST = 1e9
"""Programs with larger intermediate values are not drawn."""

LOOSEST = 1e-3
"""Nor those whose bound is larger than this share of the largest value of the tensor."""

TINY = 2.0**-140
"""Added to every bound: what underflow in float32 may lose, some times over."""

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass(frozen=True)
class Traced:
    """An exact value (complex128, float64, int64 or bool), and a bound on the error of what a program computes."""

    value: torch.Tensor
    error: torch.Tensor

    @property
    def size(self) -> torch.Tensor:
        """Upper bound of the modulus of what is computed."""
        return self.value.abs() + self.error

    @property
    def sane(self) -> bool:
        """Neither so large nor so uncertain that a comparison says nothing."""
        if self.value.numel() == 0:
            return True
        largest = self.value.abs().max().item()
        return largest <= LARGEST and self.error.max().item() <= LOOSEST * largest + TINY


def exact(value: torch.Tensor) -> Traced:
    """Returns a given value, without an error."""
    wide = torch.complex128 if value.is_complex() else torch.float64 if value.is_floating_point() else value.dtype
    return Traced(value.to(wide), torch.zeros(value.shape, dtype=torch.float64))


@dataclass(frozen=True)
class Operation:
    """One operator in a program.

    Attributes:
        listed: Its name in the strategies' promise.
        draw: Picks operands (positions) and options for it among the values so far; None where nothing fits.
        apply: Computes it; takes the options, then the operands.
        error: Bound on the result's error; takes u, the options, the exact result and the traced operands.
    """

    listed: str
    draw: Callable[[Draw, Sequence[Traced]], tuple[tuple[int, ...], tuple[Any, ...]] | None]
    apply: Callable[..., torch.Tensor]
    error: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One call: operands are positions among the leaves and the earlier steps."""

    operation: str
    operands: tuple[int, ...]
    options: tuple[Any, ...]


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from.

    Attributes:
        place: input, parameter, buffer, scratch (a buffer outside state_dict) or constant.
        dtype: Dtype.
        shape: Shape.
        seed: Seed of its values.
    """

    place: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int

    def tensor(self) -> torch.Tensor:
        """Its values: of several magnitudes, exact in its dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.dtype == torch.int64:
            return torch.randint(-5, 6, self.shape, generator=generator)
        shape = (*self.shape, 2) if self.dtype.is_complex else self.shape
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values = values * torch.exp(torch.randn(shape, generator=generator, dtype=torch.float64))
        # a view would bring torch.export's guard on its base, which PyTorch's own run_decompositions then fails on
        return (torch.view_as_complex(values) if self.dtype.is_complex else values).to(self.dtype, copy=True)


class ProgramModule(torch.nn.Module):
    """A drawn program as PyTorch runs and exports it."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        for position, leaf in enumerate(program.leaves):
            if leaf.place == "parameter":
                self.register_parameter(f"leaf{position}", torch.nn.Parameter(leaf.tensor(), requires_grad=False))
            elif leaf.place in ("buffer", "scratch"):
                self.register_buffer(f"leaf{position}", leaf.tensor(), persistent=leaf.place == "buffer")
            elif leaf.place == "constant":
                setattr(self, f"leaf{position}", leaf.tensor())

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = list(inputs)
        values = [
            left.pop(0) if leaf.place == "input" else getattr(self, f"leaf{position}")
            for position, leaf in enumerate(self.program.leaves)
        ]
        for step in self.program.steps:
            values.append(OPERATIONS[step.operation].apply(step.options, *(values[i] for i in step.operands)))
        return tuple(values[i] for i in self.program.outputs)


@dataclass(frozen=True)
class Program:
    """A composition of operators, as plain data."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]

    @property
    def outputs(self) -> tuple[int, ...]:
        """What no step takes, of the steps' results."""
        taken = {position for step in self.steps for position in step.operands}
        first = len(self.leaves)
        return tuple(i for i in range(first, first + len(self.steps)) if i not in taken)

    @property
    def unit(self) -> float:
        """u of the narrowest floating dtype in the program."""
        narrow = any(leaf.dtype in (torch.float32, torch.complex64) for leaf in self.leaves) or any(
            torch.complex64 in step.options or torch.float32 in step.options for step in self.steps
        )
        return 2.0**-24 if narrow else 2.0**-53

    def module(self) -> torch.nn.Module:
        """The program as a module, in its own dtypes."""
        return ProgramModule(self).eval()

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Its inputs."""
        return tuple(leaf.tensor() for leaf in self.leaves if leaf.place == "input")

    def expected(self) -> list[Traced]:
        """Exact results (in complex128) with bounds for the program's dtype and for complex128 itself, added up."""
        traces = [exact(leaf.tensor()) for leaf in self.leaves]
        for step in self.steps:
            traces.append(trace(step, traces, self.unit))
        return [with_reference_error(traces[i], self.unit) for i in self.outputs]


def with_reference_error(result: Traced, unit: float) -> Traced:
    """Returns a value with the error of a reference that is itself computed in complex128."""
    return Traced(result.value, result.error * (1 + 2.0**-53 / unit))


def trace(step: Step, values: Sequence[Traced], unit: float) -> Traced:
    """Returns the exact result of a step, and the bound on its error."""
    operation = OPERATIONS[step.operation]
    operands = [values[i] for i in step.operands]
    options = tuple(
        {torch.complex64: torch.complex128, torch.float32: torch.float64}.get(option, option)
        if isinstance(option, torch.dtype)
        else option
        for option in step.options
    )
    result = operation.apply(options, *(operand.value for operand in operands))
    return Traced(result, operation.error(unit, step.options, result, *operands) + TINY)


def assert_within(actual: Sequence[torch.Tensor], expected: Sequence[Traced]) -> None:
    """Asserts that every element lies within its bound, and that shapes and real or complex types agree."""
    assert len(actual) == len(expected)
    for position, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert got.shape == want.value.shape, f"output {position}: {tuple(got.shape)}, not {tuple(want.value.shape)}"
        assert got.is_complex() == want.value.is_complex(), f"output {position} is {got.dtype}"
        error = (got.to(want.value.dtype) - want.value).abs()
        share = (error / want.error).max().item() if error.numel() else 0.0
        assert bool((error <= want.error).all()), f"output {position}: {share:.3g} times the rounding bound"


def hold_together(run: Run, chosen: Iterable[Program | Example]) -> None:
    """Holds the outputs of programs, all of them from one run, to their bounds; names the program that is wrong."""
    parts = [Part(program, program.module(), program.arguments()) for program in chosen]
    for part, outputs in zip(parts, run_together(run, parts), strict=True):
        try:
            assert_within(outputs, part.what.expected())
        except AssertionError as error:
            error.add_note(f"in {part.what}")
            raise


# How operands are picked.


def _pick(draw: Draw, values: Sequence[Traced], wanted: Callable[[Traced], bool]) -> int | None:
    fitting = [position for position, value in enumerate(values) if wanted(value)]
    # the latest values are the likelier ones, which makes programs deep
    return draw(st.sampled_from(fitting[::-1])) if fitting else None


def _number(value: Traced) -> bool:
    return value.value.is_floating_point() or value.value.is_complex()


def _complex(value: Traced) -> bool:
    return value.value.is_complex()


def _real(value: Traced) -> bool:
    return value.value.is_floating_point()


def _unary(wanted: Callable[[Traced], bool], options: Callable[[Draw, Traced], tuple[Any, ...]] = lambda *_: ()) -> Any:
    def pick(draw: Draw, values: Sequence[Traced]) -> Any:
        position = _pick(draw, values, wanted)
        return None if position is None else ((position,), options(draw, values[position]))

    return pick


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def _binary(
    fits: Callable[[Traced, Traced], bool], options: Callable[[Draw, Traced], tuple[Any, ...]] = lambda *_: ()
) -> Any:
    """Draws two operands, at least one of them complex, in either order."""

    def pick(draw: Draw, values: Sequence[Traced]) -> Any:
        first = _pick(draw, values, _complex)
        if first is None:
            return None
        second = _pick(draw, values, lambda other: other.value.dtype != torch.bool and fits(values[first], other))
        if second is None:
            return None
        # the order matters for shapes too, where `fits` is not symmetric
        swap = draw(st.booleans()) and fits(values[second], values[first])
        return ((second, first) if swap else (first, second)), options(draw, values[first])

    return pick


def _broadcasting(a: Traced, b: Traced) -> bool:
    return _broadcasts(a.value, b.value)


_NUMBERS = (2, -3, 0.5, -1.25, 1j, -0.5j, 1.5 - 0.75j, -2 + 1j)


def _number_options(draw: Draw, _: Traced) -> tuple[Any, ...]:
    return (draw(st.sampled_from(_NUMBERS)), draw(st.booleans()))


def _dimension(draw: Draw, value: Traced) -> int:
    return draw(st.integers(-value.value.dim(), value.value.dim() - 1))


# What operators do to errors. Results are bounded by their modulus; (a, b) are the operands.


def _copied(apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Applies an operator that moves values to values and errors."""
    return lambda unit, options, result, *operands: apply(options, *(operand.error for operand in operands))


def _add_error(unit: float, options: Any, result: torch.Tensor, a: Traced, b: Traced) -> torch.Tensor:
    return a.error + b.error + unit * (result.abs() + a.error + b.error)


def _scaled_add_error(unit: float, options: Any, result: torch.Tensor, a: Traced, b: Traced) -> torch.Tensor:
    # alpha·b is a complex product
    alpha = abs(options[0])
    return a.error + alpha * b.error + unit * (result.abs() + a.error + 5 * alpha * b.size)


def _mul_error(unit: float, options: Any, result: torch.Tensor, a: Traced, b: Traced) -> torch.Tensor:
    # each part: two products and a sum, 2u(|ac| + |bd|) ≤ 2u|a||b|, hence 2√2·u in modulus
    return a.value.abs() * b.error + b.value.abs() * a.error + a.error * b.error + 3 * unit * a.size * b.size


def _div_error(unit: float, options: Any, result: torch.Tensor, a: Traced, b: Traced) -> torch.Tensor:
    # Smith: ratio u, denominator 3u without cancellation, numerators 3√2·u by Cauchy and Schwarz, division u: below 9u
    smallest = (b.value.abs() - b.error).clamp_min(0)
    propagated = (a.error + result.abs() * b.error) / smallest
    return torch.where(smallest > 0, propagated + 9 * unit * (result.abs() + propagated), torch.inf)


def _number_as(value: complex) -> Traced:
    return exact(torch.tensor(value, dtype=torch.complex128))


def _with_number(error: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Options are a Python number and whether it comes first; the number may have to be rounded."""

    def bound(unit: float, options: Any, result: torch.Tensor, a: Traced) -> torch.Tensor:
        number = _number_as(options[0])
        number = Traced(number.value, number.value.abs() * unit)
        return error(unit, (), result, *((number, a) if options[1] else (a, number)))

    return bound


def _either_way(apply: Callable[[Any, Any], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda options, a: apply(options[0], a) if options[1] else apply(a, options[0])


def _matmul_error(unit: float, options: Any, result: torch.Tensor, a: Traced, b: Traced) -> torch.Tensor:
    # each part sums 2n products in any order: (n + 1)·u·Σ|a||b|, √2 of it in modulus
    terms = a.value.shape[-1]
    exact_a, exact_b = a.value.abs(), b.value.abs()
    propagated = exact_a @ b.error + a.error @ exact_b + a.error @ b.error
    return propagated + 1.5 * (terms + 3) * unit * (a.size @ b.size)


def _dims(options: Any) -> dict[str, Any]:
    return {} if options[0] is None else {"dim": options[0], "keepdim": options[1]}


def _sum_error(unit: float, options: Any, result: torch.Tensor, a: Traced) -> torch.Tensor:
    terms = a.value.numel() // max(result.numel(), 1)
    return a.error.sum(**_dims(options)) + terms * unit * a.size.sum(**_dims(options))


def _mean_error(unit: float, options: Any, result: torch.Tensor, a: Traced) -> torch.Tensor:
    terms = a.value.numel() // max(result.numel(), 1)
    return _sum_error(unit, options, result, a) / terms + 2 * unit * result.abs()


def _exp_error(unit: float, options: Any, result: torch.Tensor, a: Traced) -> torch.Tensor:
    # two exponentials of half the real part (2u each), cosine or sine (2u), two products: 8u; half of it to spare
    return result.abs() * (torch.expm1(a.error) + 12 * unit * torch.exp(a.error))


def _abs_error(unit: float, options: Any, result: torch.Tensor, a: Traced) -> torch.Tensor:
    # scaled squares: 2u under the root, half of it after, and the root's own u; 2u for a hypot within one ulp
    return a.error + 3 * unit * a.size


def _angle_error(unit: float, options: Any, result: torch.Tensor, a: Traced) -> torch.Tensor:
    if not a.value.is_complex():
        jumps = a.value.abs() <= a.error
        return torch.where(jumps, math.pi, 4 * unit * result.abs())
    share = a.error / a.value.abs()
    # around zero and on both sides of the negative real axis the angle may be any or either
    jumps = (a.value.real - a.error <= 0) & (a.value.imag.abs() <= a.error)
    near = torch.asin(share.clamp(max=1)) + 4 * unit * math.pi
    return torch.where(jumps | ~(share < 1), 2 * math.pi, near)


def _polar_error(unit: float, options: Any, result: torch.Tensor, radius: Traced, angle: Traced) -> torch.Tensor:
    # cosine or sine 2u, product u, each a share of |radius|
    return radius.error + radius.size * (angle.error + 4 * unit)


def _pair_error(unit: float, options: Any, result: torch.Tensor, re: Traced, im: Traced) -> torch.Tensor:
    return torch.hypot(re.error, im.error)


def _cast_error(unit: float, options: Any, result: torch.Tensor, a: Traced) -> torch.Tensor:
    return a.error + unit * a.size


def _expand_shape(draw: Draw, value: Traced) -> tuple[Any, ...]:
    sizes = tuple(draw(st.integers(1, 3)) if size == 1 else size for size in value.value.shape)
    return ((draw(st.integers(1, 2)), *sizes) if draw(st.booleans()) else sizes,)


def _new_shape(draw: Draw, value: Traced) -> tuple[Any, ...]:
    count = value.value.numel()
    first = draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0])) if count else 0
    shapes = [(-1,), (first, count // first), (1, -1, first)] if count else [(0, 2)]
    return (draw(st.sampled_from(shapes)),)


def _slice_options(draw: Draw, value: Traced) -> tuple[Any, ...]:
    dimension = _dimension(draw, value)
    start = draw(st.integers(-2, value.value.shape[dimension] - 1))
    return (dimension, start, draw(st.sampled_from((1, 2, 9))), draw(st.sampled_from((1, 1, 2))))


def _slice(options: Any, a: torch.Tensor) -> torch.Tensor:
    dimension, start, length, step = options
    index = [slice(None)] * a.dim()
    start = start + a.shape[dimension] if start < 0 else start
    index[dimension] = slice(start, start + length, step)
    return a[tuple(index)]


def _index_options(draw: Draw, value: Traced) -> tuple[Any, ...]:
    dimension = _dimension(draw, value) % value.value.dim()
    size = value.value.shape[dimension]
    return (dimension, tuple(draw(st.lists(st.integers(-size, size - 1), min_size=1, max_size=4))))


def _index(options: Any, a: torch.Tensor) -> torch.Tensor:
    return a[(*[slice(None)] * options[0], torch.tensor(options[1]))]


def _joinable(draw: Draw, values: Sequence[Traced], stacked: bool) -> Any:
    first = _pick(draw, values, lambda value: _complex(value) and value.value.dim() > 0)
    if first is None:
        return None
    same = [i for i, value in enumerate(values) if _number(value) and value.value.shape == values[first].value.shape]
    others = draw(st.lists(st.sampled_from(same), min_size=1, max_size=2))
    dimension = draw(st.integers(0, values[first].value.dim() - (0 if stacked else 1)))
    return tuple(draw(st.permutations([first, *others]))), (dimension,)


def _where_draw(draw: Draw, values: Sequence[Traced]) -> Any:
    picked = _binary(_broadcasting)(draw, values)
    if picked is None or any(values[i].value.dtype == torch.int64 for i in picked[0]):
        return None
    shape = torch.broadcast_shapes(*(values[i].value.shape for i in picked[0]))
    fits = [
        i for i, value in enumerate(values) if value.value.dtype == torch.bool and _reaches(value.value.shape, shape)
    ]
    return ((draw(st.sampled_from(fits)), *picked[0]), ()) if fits else None


def _reaches(shape: Sequence[int], wider: Sequence[int]) -> bool:
    return _broadcasts(torch.empty(tuple(shape), device="meta"), torch.empty(tuple(wider), device="meta"))


def _where_number_draw(draw: Draw, values: Sequence[Traced]) -> Any:
    first = _pick(draw, values, _number)
    fits = [i for i, v in enumerate(values) if v.value.dtype == torch.bool and _broadcasting(v, values[first])]
    return ((draw(st.sampled_from(fits)), first), (draw(st.sampled_from(_NUMBERS)),)) if fits else None


def _where_error(unit: float, options: Any, result: torch.Tensor, mask: Traced, *rest: Traced) -> torch.Tensor:
    a, b = (*rest, exact(torch.tensor(options[0])))[:2] if options else rest
    return torch.where(mask.value, a.error, b.error) + unit * result.abs()


def _matmul_fits(a: Traced, b: Traced) -> bool:
    if not (_number(a) and _number(b) and a.value.dim() in (2, 3) and a.value.dim() == b.value.dim()):
        return False
    return a.value.shape[-1] == b.value.shape[-2] and a.value.shape[:-2] == b.value.shape[:-2]


def _einsum_fits(a: Traced, b: Traced) -> bool:
    return _number(a) and _number(b) and a.value.dim() == 2 == b.value.dim() and a.value.shape[1] == b.value.shape[1]


def _einsum(options: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kind = torch.promote_types(a.dtype, b.dtype)  # einsum itself wants one dtype
    return torch.einsum("ij,kj->ki", a.to(kind), b.to(kind))


def _matmul(options: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    kind = torch.promote_types(a.dtype, b.dtype)
    return a.to(kind) @ b.to(kind)


def _einsum_error(unit: float, options: Any, result: torch.Tensor, a: Traced, b: Traced) -> torch.Tensor:
    return _matmul_error(unit, options, result, b, Traced(a.value.mT, a.error.mT))


def _same_shape(wanted: Callable[[Traced], bool]) -> Any:
    def pick(draw: Draw, values: Sequence[Traced]) -> Any:
        first = _pick(draw, values, wanted)
        if first is None:
            return None
        shape = values[first].value.shape
        return (first, _pick(draw, values, lambda v: wanted(v) and v.value.shape == shape)), ()

    return pick


def _dims_options(draw: Draw, value: Traced) -> tuple[Any, ...]:
    if value.value.dim() == 0 or draw(st.booleans()):
        return (None, False)
    return ((_dimension(draw, value),), draw(st.booleans()))


def _moved(
    apply: Callable[..., torch.Tensor], wanted: Any, options: Any = lambda *_: (), listed: str = ""
) -> Operation:
    return Operation(listed, _unary(wanted, options), apply, _copied(apply))


def _has_dims(value: Traced) -> bool:
    return _complex(value) and value.value.dim() > 0


def _paired(value: Traced) -> bool:
    return _real(value) and value.value.dim() > 0 and value.value.shape[-1] == 2


def _matched(re: torch.Tensor, im: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.promote_types(re.dtype, im.dtype)
    return re.to(kind), im.to(kind)


def _cat(options: Any, *tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensors, dim=options[0])


def _stack(options: Any, *tensors: torch.Tensor) -> torch.Tensor:
    kind = tensors[0].dtype
    for tensor in tensors[1:]:
        kind = torch.promote_types(kind, tensor.dtype)
    return torch.stack([tensor.to(kind) for tensor in tensors], dim=options[0])  # stack itself wants one dtype


OPERATIONS: dict[str, Operation] = {
    "polar": Operation("polar", _same_shape(_real), lambda o, r, a: torch.polar(*_matched(r, a)), _polar_error),
    "complex": Operation(
        "complex", _same_shape(_real), lambda o, re, im: torch.complex(*_matched(re, im)), _pair_error
    ),
    "view_as_complex": Operation(
        "view_as_complex",
        _unary(_paired),
        lambda o, a: torch.view_as_complex(a.contiguous()),
        lambda u, o, r, a: torch.hypot(a.error[..., 0], a.error[..., 1]),
    ),
    "view_as_real": Operation(
        "view_as_real",
        _unary(_complex),
        lambda o, a: torch.view_as_real(a.resolve_conj()),
        lambda u, o, r, a: a.error[..., None].expand(r.shape),
    ),
    "real": Operation("real", _unary(_complex), lambda o, a: a.real, lambda u, o, r, a: a.error),
    "imag": Operation("imag", _unary(_complex), lambda o, a: a.imag, lambda u, o, r, a: a.error),
    "conj": Operation("conj", _unary(_complex), lambda o, a: a.conj(), lambda u, o, r, a: a.error),
    "abs": Operation("abs", _unary(_complex), lambda o, a: a.abs(), _abs_error),
    "angle": Operation("angle", _unary(_complex), lambda o, a: a.angle(), _angle_error),
    "exp": Operation("exp", _unary(_complex), lambda o, a: a.exp(), _exp_error),
    "add": Operation("add", _binary(_broadcasting), lambda o, a, b: a + b, _add_error),
    "sub": Operation("sub", _binary(_broadcasting), lambda o, a, b: a - b, _add_error),
    "add_alpha": Operation(
        "add",
        _binary(_broadcasting, lambda draw, _: (draw(st.sampled_from(_NUMBERS[:1] + _NUMBERS[4:])),)),
        lambda o, a, b: torch.add(a, b, alpha=o[0]),
        _scaled_add_error,
    ),
    "mul": Operation("mul", _binary(_broadcasting), lambda o, a, b: a * b, _mul_error),
    "div": Operation("div", _binary(_broadcasting), lambda o, a, b: a / b, _div_error),
    "add_number": Operation(
        "add", _unary(_number, _number_options), _either_way(lambda a, b: a + b), _with_number(_add_error)
    ),
    "sub_number": Operation(
        "sub", _unary(_number, _number_options), _either_way(lambda a, b: a - b), _with_number(_add_error)
    ),
    "mul_number": Operation(
        "mul", _unary(_number, _number_options), _either_way(lambda a, b: a * b), _with_number(_mul_error)
    ),
    "div_number": Operation(
        # PyTorch divides a number by multiplying with the reciprocal
        "div",
        _unary(_complex, _number_options),
        _either_way(lambda a, b: a / b),
        _with_number(lambda u, o, r, a, b: _div_error(u, o, r, a, b) + 4 * u * r.abs()),
    ),
    "neg": Operation("neg", _unary(_complex), lambda o, a: -a, lambda u, o, r, a: a.error),
    "matmul": Operation("mm", _binary(_matmul_fits), _matmul, _matmul_error),
    "einsum": Operation("einsum", _binary(_einsum_fits), _einsum, _einsum_error),
    "sum": Operation("sum", _unary(_complex, _dims_options), lambda o, a: a.sum(**_dims(o)), _sum_error),
    "mean": Operation("mean", _unary(_complex, _dims_options), lambda o, a: a.mean(**_dims(o)), _mean_error),
    "reshape": _moved(lambda o, a: a.reshape(o[0]), _complex, _new_shape, "reshape"),
    "view": _moved(lambda o, a: a.contiguous().view(o[0]), _complex, _new_shape, "view"),
    "permute": _moved(
        lambda o, a: a.permute(o),
        _has_dims,
        lambda draw, value: tuple(draw(st.permutations(range(value.value.dim())))),
        "permute",
    ),
    "transpose": _moved(
        lambda o, a: a.transpose(*o),
        _has_dims,
        lambda draw, value: (_dimension(draw, value), _dimension(draw, value)),
        "transpose",
    ),
    "expand": _moved(lambda o, a: a.expand(o[0]), _complex, _expand_shape, "expand"),
    "repeat": _moved(
        lambda o, a: a.repeat(o),
        _has_dims,
        lambda draw, value: tuple(draw(st.integers(1, 2)) for _ in value.value.shape),
        "repeat",
    ),
    "cat": Operation("cat", lambda draw, values: _joinable(draw, values, False), _cat, _copied(_cat)),
    "stack": Operation("stack", lambda draw, values: _joinable(draw, values, True), _stack, _copied(_stack)),
    "index": _moved(_index, _has_dims, _index_options, "index"),
    "select": _moved(
        lambda o, a: a.select(*o),
        _has_dims,
        lambda draw, value: (
            dimension := _dimension(draw, value),
            draw(st.integers(-value.value.shape[dimension], value.value.shape[dimension] - 1)),
        ),
        "select",
    ),
    "slice": _moved(_slice, _has_dims, _slice_options, "slice"),
    "where": Operation("where", _where_draw, lambda o, mask, a, b: torch.where(mask, a, b), _where_error),
    "where_number": Operation("where", _where_number_draw, lambda o, mask, a: torch.where(mask, a, o[0]), _where_error),
    "unsqueeze": _moved(
        lambda o, a: a.unsqueeze(o[0]), _complex, lambda draw, v: (draw(st.integers(0, v.value.dim())),), "unsqueeze"
    ),
    "squeeze": _moved(lambda o, a: a.squeeze(*o), _has_dims, lambda draw, v: (_dimension(draw, v),), "squeeze"),
    "squeeze_all": _moved(lambda o, a: a.squeeze(), _complex, listed="squeeze"),
    "clone": _moved(lambda o, a: a.clone(), _complex, listed="clone"),
    "cast": Operation(
        "dtype and device moves",
        _unary(_number, lambda draw, _: (draw(st.sampled_from((torch.complex64, torch.complex128))),)),
        lambda o, a: a.to(o[0]),
        _cast_error,
    ),
    "device": _moved(lambda o, a: a.to("cpu", copy=True), _complex, listed="dtype and device moves"),
}
"""Every operator that programs are made of, by name."""

_PLACES = ("input", "input", "input", "parameter", "buffer", "scratch", "constant")
_SHAPES = ((3, 3), (2, 3), (), (3,), (2, 3, 3), (3, 3), (1,), (3, 2), (3, 1), (2, 3, 3), (1, 3, 2))
_LEAVES = ("complex", "real", "complex", "real", "other", "integer")
# those that seldom find operands are tried more often
_NAMES = (*OPERATIONS, *("matmul", "einsum", "polar", "view_as_complex", "complex") * 3)
_MOST_ELEMENTS = 200


@st.composite
def programs(draw: Draw, most_steps: int = 8, first: str | None = None) -> Program:
    """Draws a program of 1 to `most_steps` operators, each with operands that fit and a result worth comparing.

    `first` names the operator of `OPERATIONS` that it begins with.

    The leaves are a complex input of either precision, up to four more of any kind and place (complex, real, complex of
    the other precision, integer), and masks of two of their shapes.
    """
    kinds = [(torch.complex64, torch.float32), (torch.complex128, torch.float64)]
    base, other = draw(st.permutations(kinds))
    dtypes = {"complex": base[0], "real": base[1], "other": other[0], "integer": torch.int64}
    seeds = st.integers(0, 2**16)
    leaves = [Leaf("input", base[0], draw(st.sampled_from(_SHAPES)) if first is None else (3, 3), draw(seeds))]
    if first is not None:  # a complex square, a real tensor of pairs and a mask are operands for every operator
        leaves.append(Leaf("input", base[1], (3, 2), draw(seeds)))
    for kind in draw(st.lists(st.sampled_from(_LEAVES), max_size=4)):
        leaves.append(Leaf(draw(st.sampled_from(_PLACES)), dtypes[kind], draw(st.sampled_from(_SHAPES)), draw(seeds)))
    leaves += [Leaf("input", torch.bool, shape, draw(seeds)) for shape in dict.fromkeys((leaves[0].shape, (3, 3)))]
    values = [exact(leaf.tensor()) for leaf in leaves]
    steps: list[Step] = []
    for _ in range(draw(st.integers(3, 2 * most_steps))):
        name = draw(st.sampled_from(_NAMES)) if steps or first is None else first
        picked = OPERATIONS[name].draw(draw, values)
        if picked is None or len(steps) == most_steps:
            continue
        step = Step(name, *picked)
        result = trace(step, values, 2.0**-24)  # the largest unit that a program may have
        if result.sane and result.value.numel() <= _MOST_ELEMENTS:
            steps.append(step)
            values.append(result)
    assume(steps or first is None)
    return Program(tuple(leaves), tuple(steps) or (Step("mul", (0, 0), ()),))


@dataclass(frozen=True)
class Example:
    """A program as people write it, in complex64.

    Attributes:
        name: Test id.
        make: Makes the module for a real dtype; the module of float64 is the reference.
        inputs: Makes its inputs for a real dtype; those of float64 are the same values.
        bound: Takes the inputs of float64, u and the results; returns the bound on the error of each.
    """

    name: str
    make: Callable[[torch.dtype], torch.nn.Module]
    inputs: Callable[[torch.dtype], tuple[torch.Tensor, ...]]
    bound: Callable[[tuple[torch.Tensor, ...], float, list[torch.Tensor]], list[torch.Tensor]]
    dtype: torch.dtype = field(default=torch.float32)

    def module(self) -> torch.nn.Module:
        """The module in its own dtype."""
        return self.make(self.dtype).eval()

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Its inputs."""
        return self.inputs(self.dtype)

    @torch.no_grad()
    def expected(self) -> list[Traced]:
        """Results of the module in float64 and complex128, with bounds."""
        unit = torch.finfo(self.dtype).eps / 2
        inputs = self.inputs(torch.float64)
        results = self.make(torch.float64).eval()(*inputs)
        results = list(results) if isinstance(results, tuple) else [results]
        bounds = self.bound(inputs, unit, results)
        return [with_reference_error(Traced(r, b + TINY), unit) for r, b in zip(results, bounds, strict=True)]


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draws float32 values in a real or complex dtype."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=kind).to(dtype)


def _complex_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype == torch.float32 else torch.complex128


class LlamaRope(torch.nn.Module):
    """One-dimensional RoPE in the form of LLaMA: tables by torch.polar, in forward, products of complex numbers."""

    def __init__(self, dtype: torch.dtype, theta: float = 10000.0) -> None:
        super().__init__()
        self.dtype, self.theta = dtype, theta

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k are [batch, tokens, heads, features]."""
        tokens, features = q.shape[1], q.shape[3]
        frequencies = 1.0 / (self.theta ** (torch.arange(0, features, 2).to(self.dtype) / features))
        angles = torch.outer(torch.arange(tokens).to(self.dtype), frequencies)
        table = torch.polar(torch.ones_like(angles), angles).view(1, tokens, 1, features // 2)
        rotated = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * table for x in (q, k))
        q, k = (torch.view_as_real(x).flatten(3) for x in rotated)
        return q, k


def _rope_bound(inputs: tuple[torch.Tensor, ...], unit: float, results: list[torch.Tensor]) -> list[torch.Tensor]:
    # angles: exponent, power (condition ln θ), reciprocal, product, some 16u at most; table 4u; product 3u
    angle = torch.arange(inputs[0].shape[1], dtype=torch.float64)[None, :, None, None, None]
    bounds = []
    for x in inputs:
        pairs = x.unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(*x.shape[:-1], -1, 2)
        bounds.append(((16 * angle + 8) * unit * pairs).flatten(3))
    return bounds


class Fourier(torch.nn.Module):
    """A discrete Fourier transform and its inverse as matrix products."""

    def __init__(self, dtype: torch.dtype, points: int = 12) -> None:
        super().__init__()
        turn = torch.arange(points, dtype=torch.float64)
        turn = torch.outer(turn, turn) % points * (-2 * math.pi / points)
        self.register_buffer("matrix", torch.polar(torch.ones_like(turn), turn).to(_complex_of(dtype)))

    def forward(self, signal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spectrum = signal.to(self.matrix.dtype) @ self.matrix
        return spectrum, (spectrum @ self.matrix.conj() / self.matrix.shape[0]).real


def _fourier_bound(inputs: tuple[torch.Tensor, ...], unit: float, results: list[torch.Tensor]) -> list[torch.Tensor]:
    points = inputs[0].shape[-1]
    # entries are rounded to u, of modulus 1: every output sums the moduli of all inputs
    first = (1.5 * (points + 3) + 2) * unit * inputs[0].abs().sum(-1, keepdim=True)
    second = first * (points + 1) + (1.5 * (points + 3) + 2) * unit * results[0].abs().sum(-1, keepdim=True)
    return [first.expand(results[0].shape), (second / points + 2 * unit * results[1].abs()).expand(results[1].shape)]


class ComplexNetwork(torch.nn.Module):
    """Two complex linear layers with modReLU between them (arXiv:1511.06464), then the moduli."""

    def __init__(self, dtype: torch.dtype, width: int = 8) -> None:
        super().__init__()
        kind = _complex_of(dtype)
        self.first = torch.nn.Parameter(_values((width, width), kind, 1), requires_grad=False)
        self.bias = torch.nn.Parameter(_values((width,), kind, 2), requires_grad=False)
        self.second = torch.nn.Parameter(_values((width, 3), kind, 3), requires_grad=False)
        self.threshold = torch.nn.Parameter(_values((width,), dtype, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.nn.functional.linear(x, self.first, self.bias)
        length = hidden.abs()
        active = torch.relu(length + self.threshold) * (hidden / length)
        result = torch.einsum("bi,ij->bj", active, self.second)
        return result, result.abs()


def _network_bound(inputs: tuple[torch.Tensor, ...], unit: float, results: list[torch.Tensor]) -> list[torch.Tensor]:
    network = ComplexNetwork(torch.float64)
    x, first, second = exact(inputs[0]), exact(network.first.mT), exact(network.second)
    product = x.value @ first.value
    hidden = Traced(product, _matmul_error(unit, (), product, x, first))
    total = product + network.bias
    hidden = Traced(total, _add_error(unit, (), total, hidden, exact(network.bias)))
    size = total.abs()
    length = Traced(size, _abs_error(unit, (), size, hidden))
    raised = size + network.threshold
    kept = Traced(raised.relu(), _add_error(unit, (), raised, length, exact(network.threshold)))
    phase = Traced(total / size, _div_error(unit, (), total / size, hidden, length))
    active = Traced(kept.value * phase.value, _mul_error(unit, (), kept.value, kept, phase))
    error = _matmul_error(unit, (), results[0], active, second)
    return [error, _abs_error(unit, (), results[1], Traced(results[0], error))]


EXAMPLES: dict[str, Example] = {
    example.name: example
    for example in (
        Example(
            "llama_rope",
            LlamaRope,
            lambda dtype: (_values((2, 7, 3, 8), dtype, 5), _values((2, 7, 1, 8), dtype, 6)),
            _rope_bound,
        ),
        Example("fourier", Fourier, lambda dtype: (_values((3, 12), dtype, 7),), _fourier_bound),
        Example(
            "complex_network", ComplexNetwork, lambda dtype: (_values((5, 8), _complex_of(dtype), 8),), _network_bound
        ),
    )
}
"""Programs as people write them, by name; the network takes complex inputs."""
