"""Every ATen operator that the components use, through export, import, the CPU pipeline and LLVM.

Each is held to PyTorch fp32 (the strict gate; integers and booleans equal) and to float64 (as accurate as PyTorch).
Two sources of cases: the calls that the components really make (fixtures/operators.json), where they are cheap enough,
and hypothesis around them. The large ones are the components' tests' to check. A few calls of every operator are
compiled without LLVM's passes; every night has more, as they ship and for other CPUs, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torchvision  # registers torchvision::roi_align
import tvm
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from conformance.support.batches import Part, drawn, run_together
from conformance.support.cpus import narrower
from conformance.support.operator_calls import load_calls
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import Arrays, run_module, run_torch
from harness.compiler.lowering.frontends.torch_export.importing import import_program
from harness.compiler.targets import TARGETS
from harness.parity.metrics import difference, oracle_ratio
from harness.runtime.threads import usable_cpus

assert torchvision.extension._has_ops()

CALLS = load_calls()
CHECKS = ("aten._assert_tensor_metadata.default", "aten.empty.memory_format")
"""Calls without a result, or with one that has no elements."""

LARGEST = 300_000
"""Elements of all operands of a recorded call that is run here."""
MOST_WORK = 1e8
"""Multiplications of a recorded call that is run here."""
MANY = 24
"""Calls of one operator that are run every night, recorded ones and as many of any shape."""
TOGETHER = 6
"""Operators of which one program has calls."""

WORST_R_RMS = 1.5


class Use(torch.nn.Module):
    """One call of an operator on real tensors, which are the inputs: the output is its first result, or its list."""

    def __init__(
        self, operator: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.operator, self.args, self.kwargs = operator, args, kwargs or {}
        leaves, self.structure = pytree.tree_flatten((self.args, self.kwargs))
        self.inputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def __repr__(self) -> str:
        def brief(leaf: Any) -> Any:
            return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

        return f"{self.operator}{pytree.tree_map(brief, (self.args, self.kwargs))}"

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=False):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.operator(*args, **kwargs)
        return result[0] if isinstance(result, tuple) else result

    def widened(self) -> Use:
        """The same call in float64."""

        def widen(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.double() if value.is_floating_point() else value
            return torch.float64 if value is torch.float32 else value

        return Use(self.operator, *pytree.tree_map(widen, (self.args, self.kwargs)))


def check(uses: Sequence[Use], targets: Sequence[tvm.target.Target]) -> None:
    """Holds the calls, all compiled in one program for each target, to PyTorch and to float64."""
    parts = [Part(use, use, use.inputs) for use in uses]
    for target in targets:
        try:
            found = run_together(lambda module, inputs, target=target: compiled(module, inputs, target), parts)
            for use, outputs in zip(uses, found, strict=True):
                hold(use, [output.numpy() for output in outputs])
        except Exception as error:
            error.add_note(f"compiled for {target}")
            raise


def compiled(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], target: tvm.target.Target
) -> list[torch.Tensor]:
    """The outputs of a module that is compiled by the CPU's pipeline."""
    inputs = inputs or (torch.zeros(1),)
    imported, parameters = import_program(export_program(module, inputs))
    assert not parameters
    arrays = [tensor.numpy() for tensor in inputs]
    return [*map(torch.from_numpy, run_module(imported, arrays, target, TARGETS["llvm"].pipeline(target)))]


def targets() -> list[tvm.target.Target]:
    """This machine's CPU, and those that other machines have and this one can execute."""
    others = [tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": usable_cpus()}) for cpu in narrower()]
    return [TARGETS["llvm"].tvm_target(), *others]


def unoptimized() -> tvm.target.Target:
    """This machine's CPU without LLVM's passes."""
    return tvm.target.Target({**TARGETS["llvm"].tvm_target().export(), "opt-level": 0})


def hold(use: Use, actual: Arrays) -> None:
    """Compares what one call returned."""
    expected, oracle = run_torch(use, use.inputs), run_torch(widened := use.widened(), widened.inputs)
    assert len(actual) == len(expected) == len(oracle)
    for got, wanted, exact in zip(actual, expected, oracle, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), use
        if got.dtype.kind != "f":
            np.testing.assert_array_equal(got, wanted, err_msg=str(use))
        elif got.size:
            assert difference(got, wanted).outside == 0, f"{np.nanmax(np.abs(got - wanted))} in {use}"
            ratio = oracle_ratio(got, wanted, exact.astype(np.float64))
            assert not ratio.r_rms > WORST_R_RMS, f"{ratio} in {use}"


# Recorded calls


def _operator(name: str) -> Callable[..., Any]:
    namespace, packet, overload = name.split(".")
    operator: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return operator


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "shape" in value


def _elements(arguments: Any) -> list[list[int]]:
    leaves, _ = pytree.tree_flatten(arguments, is_leaf=_is_tensor)
    return [leaf["shape"] for leaf in leaves if _is_tensor(leaf)]


def _work(name: str, shapes: list[list[int]]) -> float:
    if name in ("aten.addmm.default", "aten.bmm.default"):
        left, right = shapes[-2:]
        return math.prod(left) * right[-1]
    if name == "aten.convolution.default":
        image, kernel = shapes[:2]
        return math.prod(image) * math.prod(kernel) / max(image[1], 1)
    if "attention" in name:
        query, key = shapes[:2]
        return 2 * math.prod(query) * key[-2]
    return 0.0


def _affordable(name: str) -> list[list[Any]]:
    calls = []
    for call in CALLS[name]:
        shapes = _elements(call)
        if sum(math.prod(shape) for shape in shapes) <= LARGEST and _work(name, shapes) <= MOST_WORK:
            calls.append(call)
    return calls


def _tensor(name: str, shape: list[int], dtype: str, generator: torch.Generator) -> torch.Tensor:
    if dtype == "bool":
        return torch.rand(shape, generator=generator) > 0.4
    if dtype in ("int64", "int32"):
        return torch.randint(0, 2, shape, dtype=getattr(torch, dtype), generator=generator)
    values = torch.randn(shape, generator=generator)
    return values.abs() + 1e-3 if ".log" in name or ".sqrt" in name else values


def _recorded(name: str, call: list[Any], generator: torch.Generator) -> Use:
    def revive(value: Any) -> Any:
        if _is_tensor(value):
            return _tensor(name, value["shape"], value["dtype"], generator)
        if isinstance(value, str):
            return getattr(torch, value.removeprefix("torch.")) if value.startswith("torch.") else _text(value)
        return value

    args, kwargs = pytree.tree_map(revive, call, is_leaf=_is_tensor)
    if name in ("aten.addmm.default", "aten.bmm.default"):
        args[-1] = args[-1] / math.sqrt(max(args[-1].shape[-2], 1))
    if name == "aten.convolution.default":
        args[1] = args[1] / math.sqrt(math.prod(args[1].shape[1:]))
    if name == "aten.scatter.src":
        # rows at distinct places: which of two equal indices wins is not defined
        rows, target = args[2].shape[0], args[0].shape[0]
        places = torch.stack([torch.randperm(target, generator=generator)[:rows] for _ in range(args[2].shape[1])], 1)
        args[2] = places[:, :, None].expand(args[2].shape).contiguous()
    if name == "aten.index.Tensor":
        args[1] = [places % extent for places, extent in zip(args[1], args[0].shape, strict=False)]
    if name == "torchvision.roi_align.default" and len(args[1]):
        args[1] = _boxes(len(args[1]), args[0].shape, generator)
    return Use(_operator(name), tuple(args), kwargs)


def _text(value: str) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def _boxes(count: int, image: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """[count, 5]: index of the image, then two corners, some of them outside of the image or of no size."""
    index = torch.randint(0, image[0], (count, 1), generator=generator).float()
    corner = (torch.rand(count, 2, generator=generator) * 1.2 - 0.1) * torch.tensor([image[3], image[2]])
    size = (torch.rand(count, 2, generator=generator) - 0.1).clamp(min=0) * torch.tensor([image[3], image[2]])
    return torch.cat([index, corner, corner + size], dim=1)


def recorded(name: str, most: int) -> list[Use]:
    """Recorded calls of an operator, at most so many, spread over all; none is affordable of some."""
    generator = torch.Generator().manual_seed(0)
    calls = _affordable(name)
    return [_recorded(name, call, generator) for call in calls[:: max(1, math.ceil(len(calls) / most))]]


# Hypothesis around them

aten = torch.ops.aten

sizes = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16, 17, 33))
seeds = st.integers(0, 2**31)


def shapes(least: int = 1, most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `least` to `most` dimensions and at most a few thousand elements."""
    return st.lists(sizes, min_size=least, max_size=most).map(tuple).filter(lambda shape: math.prod(shape) <= 4096)


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    low: float | None = None,
    high: float | None = None,
) -> torch.Tensor:
    """A seeded tensor: normal, or uniform between `low` and `high`; integers in [low, high); booleans."""
    shape = shape if isinstance(shape, tuple) else draw(shapes() if shape is None else shape)
    generator = torch.Generator().manual_seed(draw(seeds))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.4
    if dtype is torch.int64:
        return torch.randint(int(low or 0), int(10 if high is None else high), shape, generator=generator)
    if low is not None and high is not None:
        return low + (high - low) * torch.rand(shape, generator=generator)
    return scale * torch.randn(shape, generator=generator)


@st.composite
def broadcastable(draw: st.DrawFn, count: int) -> list[tuple[int, ...]]:
    """Shapes that broadcast to a common one, all dimensions of some of them 1 or missing."""
    common = draw(shapes(1, 4))
    result = []
    for _ in range(count):
        shape = tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in common)
        result.append(shape[draw(st.integers(0, len(shape) - 1)) if draw(st.booleans()) else 0 :])
    return result


numbers = st.sampled_from((0.5, -1.5, 2.0, 3, 6.283185307179586, 1e-3))
dtypes = st.sampled_from((torch.float32, torch.float32, torch.int64, torch.bool))


def dim_of(draw: st.DrawFn, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


@st.composite
def binary(draw: st.DrawFn, operator: Any, low: float | None = None, high: float | None = None) -> Use:
    """Two tensors of any dtypes, or a tensor and a number."""
    left, right = draw(broadcastable(2))
    kinds = [draw(dtypes), draw(dtypes)]
    if torch.bool in kinds and (torch.float32 not in kinds or operator is aten.sub.Tensor):
        kinds = [torch.float32, torch.int64]
    first = draw(tensors(left, kinds[0], low=low, high=high))
    second = draw(st.one_of(numbers, tensors(right, kinds[1], low=low, high=high)))
    if kinds[0] is torch.bool and not isinstance(second, torch.Tensor):
        first = first.float()
    return Use(operator, (first, second))


@st.composite
def unary(
    draw: st.DrawFn, operator: Any, low: float | None = None, high: float | None = None, scale: float = 2.0
) -> Use:
    """A float tensor of any shape."""
    return Use(operator, (draw(tensors(low=low, high=high, scale=scale)),))


@st.composite
def comparison(draw: st.DrawFn, operator: Any) -> Use:
    left, right = draw(broadcastable(2))
    dtype = draw(dtypes)
    second = draw(st.one_of(st.sampled_from((0, 1, 2)), tensors(right, draw(dtypes), low=0, high=3)))
    first = draw(tensors(left, dtype, low=0, high=3))
    return Use(operator, (first.round() if dtype is torch.float32 else first, second))


@st.composite
def softmax(draw: st.DrawFn) -> Use:
    x = draw(tensors(scale=3.0))
    return Use(aten._softmax.default, (x, dim_of(draw, x.dim()), False))


@st.composite
def to_copy(draw: st.DrawFn) -> Use:
    kinds = st.sampled_from((torch.float32, torch.int64, torch.bool))
    x = draw(tensors(dtype=draw(kinds), scale=3.0))
    return Use(aten._to_copy.default, (x,), {"dtype": draw(kinds)})


@st.composite
def addmm(draw: st.DrawFn) -> Use:
    m, k, n = (draw(st.integers(1, 70)) for _ in range(3))
    bias = draw(tensors(draw(st.sampled_from(((n,), (1, n), (m, n))))))
    kwargs = draw(st.sampled_from(({}, {}, {"beta": 0.5}, {"alpha": 2.0})))
    return Use(aten.addmm.default, (bias, draw(tensors((m, k))), draw(tensors((k, n))) / math.sqrt(k)), kwargs)


@st.composite
def bmm(draw: st.DrawFn) -> Use:
    b, m, k, n = draw(st.integers(1, 5)), *(draw(st.integers(1, 50)) for _ in range(3))
    return Use(aten.bmm.default, (draw(tensors((b, m, k))), draw(tensors((b, k, n))) / math.sqrt(k)))


@st.composite
def arange(draw: st.DrawFn) -> Use:
    start, count, step = draw(st.integers(-5, 5)), draw(st.integers(0, 40)), draw(st.sampled_from((1, 2, 3, -1)))
    return Use(
        aten.arange.start_step,
        (start, start + step * count, step),
        {"dtype": draw(st.sampled_from((torch.float32, None)))},
    )


@st.composite
def cat(draw: st.DrawFn) -> Use:
    shape = draw(shapes(1, 4))
    dim = dim_of(draw, len(shape))
    dtype = draw(dtypes)
    parts = []
    for size in draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)):
        part = list(shape)
        part[dim] = size
        parts.append(draw(tensors(tuple(part), dtype)))
    return Use(aten.cat.default, (parts, dim))


@st.composite
def clamp(draw: st.DrawFn) -> Use:
    x = draw(tensors(dtype=draw(st.sampled_from((torch.float32, torch.int64))), scale=3.0))
    bounds = draw(st.sampled_from(((0, 1), (None, 1), (0.5, None), (-12.0, 12.0), (2, 1))))
    return Use(aten.clamp.default, (x, *bounds))


@st.composite
def convolution(draw: st.DrawFn) -> Use:
    transposed = draw(st.booleans())
    groups = draw(st.sampled_from((1, 1, 2)))
    channels, filters = (groups * draw(st.integers(1, 9)) for _ in range(2))
    kernel = draw(st.sampled_from(((1, 1), (2, 2), (3, 3), (3, 2), (7, 7))))
    stride = draw(st.sampled_from((1, 2, kernel[0])))
    padding = draw(st.integers(0, kernel[0] // 2))
    image = (
        draw(st.integers(1, 2)),
        channels,
        kernel[0] + draw(st.integers(0, 9)),
        kernel[1] + draw(st.integers(0, 9)),
    )
    weight = (channels, filters // groups, *kernel) if transposed else (filters, channels // groups, *kernel)
    extra = draw(st.integers(0, stride - 1)) if transposed else 0
    bias = draw(st.one_of(st.none(), tensors((filters,))))
    fan = math.sqrt(math.prod(kernel) * channels / groups)
    return Use(
        aten.convolution.default,
        (
            *(draw(tensors(image)), draw(tensors(weight)) / fan, bias, [stride] * 2, [padding] * 2, [1, 1]),
            *(transposed, [extra] * 2, groups),
        ),
    )


@st.composite
def div_mode(draw: st.DrawFn) -> Use:
    dtype = draw(st.sampled_from((torch.float32, torch.int64)))
    x = (
        draw(tensors(dtype=dtype, low=-40, high=40)).round()
        if draw(st.booleans())
        else draw(tensors(dtype=dtype, low=-40, high=40))
    )
    divisors = (2, 3, -4) if dtype is torch.int64 else (2, 3, 0.1, -0.7, 0.5)
    mode = draw(st.sampled_from(("floor", "trunc", None)))
    return Use(aten.div.Tensor_mode, (x, draw(st.sampled_from(divisors))), {"rounding_mode": mode})


@st.composite
def embedding(draw: st.DrawFn) -> Use:
    rows = draw(sizes)
    return Use(
        aten.embedding.default,
        (draw(tensors((rows, draw(sizes)))), draw(tensors(shapes(0, 3), torch.int64, high=rows))),
    )


@st.composite
def expand(draw: st.DrawFn) -> Use:
    target = draw(shapes(1, 4))
    kept = [draw(st.booleans()) for _ in target]
    source = tuple(size if keep else 1 for size, keep in zip(target, kept, strict=True))
    first = draw(st.integers(0, len(target) - 1))
    wanted = [
        -1 if keep and place >= first and draw(st.booleans()) else size
        for place, (size, keep) in enumerate(zip(target, kept, strict=True))
    ]
    return Use(aten.expand.default, (draw(tensors(source[first:], draw(dtypes))), wanted))


@st.composite
def full(draw: st.DrawFn) -> Use:
    value, dtype = draw(
        st.sampled_from(
            (
                (0, torch.float32),
                (1.5, torch.float32),
                (-math.inf, torch.float32),
                (False, torch.bool),
                (3, torch.int64),
            )
        )
    )
    return Use(aten.full.default, (list(draw(shapes())), value), {"dtype": dtype})


@st.composite
def full_like(draw: st.DrawFn) -> Use:
    value, dtype = draw(
        st.sampled_from(((0, torch.float32), (1.5, torch.float32), (True, torch.bool), (3, torch.int64)))
    )
    return Use(aten.full_like.default, (draw(tensors(dtype=draw(dtypes))), value), {"dtype": dtype})


@st.composite
def grid_sample(draw: st.DrawFn) -> Use:
    batch = draw(st.integers(1, 2))
    image = draw(tensors((batch, draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9)))))
    grid = draw(tensors((batch, draw(st.integers(0, 5)), draw(st.integers(1, 4)), 2), low=-1.3, high=1.3))
    return Use(
        aten.grid_sampler_2d.default,
        (image, grid, draw(st.integers(0, 1)), draw(st.integers(0, 1)), draw(st.booleans())),
    )


@st.composite
def max_pool(draw: st.DrawFn) -> Use:
    kernel = draw(st.integers(1, 3))
    image = draw(
        tensors(
            (draw(st.integers(1, 2)), draw(st.integers(1, 5)), *(kernel + draw(st.integers(0, 9)) for _ in range(2)))
        )
    )
    return Use(
        aten.max_pool2d_with_indices.default,
        (image, [kernel] * 2, [draw(st.integers(1, 3))] * 2, [draw(st.integers(0, kernel // 2))] * 2),
    )


@st.composite
def group_norm(draw: st.DrawFn) -> Use:
    groups, batch = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    channels = groups * draw(st.integers(1, 4))
    height, width = draw(st.integers(2, 12)), draw(st.integers(1, 12))
    affine = [draw(tensors((channels,))) for _ in range(2)] if draw(st.booleans()) else [None, None]
    # Of a few numbers, two that are close and far from zero differ by what PyTorch itself rounds away.
    offset = draw(st.sampled_from((0.0, 3.0))) if channels // groups * height * width >= 16 else 0.0
    image = draw(tensors((batch, channels, height, width))) + offset
    return Use(aten.native_group_norm.default, (image, *affine, batch, channels, height * width, groups, 1e-5))


@st.composite
def layer_norm(draw: st.DrawFn) -> Use:
    shape = (*draw(shapes(1, 3)), draw(st.integers(2, 64)))
    affine = [draw(tensors(shape[-1:])) for _ in range(2)] if draw(st.booleans()) else [None, None]
    return Use(
        aten.native_layer_norm.default,
        (draw(tensors(shape)), [shape[-1]], *affine, draw(st.sampled_from((1e-5, 1e-6)))),
    )


@st.composite
def permute(draw: st.DrawFn) -> Use:
    shape = draw(st.one_of(shapes(1, 5), st.sampled_from(((0, 2, 3), (1, 0), (2, 0, 1)))))
    order = [axis - draw(st.sampled_from((0, len(shape)))) for axis in draw(st.permutations(range(len(shape))))]
    return Use(aten.permute.default, (draw(tensors(shape, draw(dtypes))), order))


@st.composite
def repeat(draw: st.DrawFn) -> Use:
    x = draw(tensors(shapes(1, 3), draw(dtypes)))
    counts = [draw(st.integers(1, 3)) for _ in range(x.dim() + draw(st.integers(0, 1)))]
    return Use(aten.repeat.default, (x, counts))


@st.composite
def scalar_tensor(draw: st.DrawFn) -> Use:
    value, dtype = draw(
        st.sampled_from(((-math.inf, torch.float32), (0.5, torch.float32), (3, torch.int64), (True, torch.bool)))
    )
    return Use(aten.scalar_tensor.default, (value,), {"dtype": dtype})


@st.composite
def attention(draw: st.DrawFn) -> Use:
    leading = draw(st.sampled_from(((), (3,), (1, 2), (2, 3), (2, 1, 2))))
    queries, keys, width, depth = draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    q, k, v = (draw(tensors((*leading, *shape))) for shape in ((queries, width), (keys, width), (keys, depth)))
    kind = draw(st.sampled_from(("none", "bool", "float", "causal")))
    if kind == "none" or (kind == "causal" and queries != keys):
        return Use(aten.scaled_dot_product_attention.default, (q, k, v), {"scale": draw(st.sampled_from((None, 0.3)))})
    if kind == "causal":
        return Use(aten.scaled_dot_product_attention.default, (q, k, v, None, 0.0, True))
    rows = draw(st.sampled_from((1, queries)))
    heads = draw(st.sampled_from(((), tuple(1 for _ in leading), leading)))
    mask = draw(tensors((*heads, rows, keys), torch.bool if kind == "bool" else torch.float32))
    if kind == "bool":
        mask[..., 0] = True
    return Use(aten.scaled_dot_product_attention.default, (q, k, v, mask))


@st.composite
def scatter(draw: st.DrawFn) -> Use:
    shape = draw(shapes(1, 3))
    axis = draw(st.integers(0, len(shape) - 1))
    rows = draw(st.integers(0, shape[axis]))
    generator = torch.Generator().manual_seed(draw(seeds))
    index = torch.rand(shape, generator=generator).argsort(axis).narrow(axis, 0, rows).contiguous()
    source = draw(tensors(tuple(index.shape)))
    return Use(aten.scatter.src, (draw(tensors(shape)), axis, index, source))


@st.composite
def select(draw: st.DrawFn) -> Use:
    x = draw(tensors(shapes(1, 5), draw(dtypes)))
    dim = dim_of(draw, x.dim())
    return Use(aten.select.int, (x, dim, dim_of(draw, x.shape[dim])))


@st.composite
def slices(draw: st.DrawFn) -> Use:
    x = draw(tensors(shapes(1, 4), draw(dtypes)))
    dim = dim_of(draw, x.dim())
    start, end = (draw(st.sampled_from((None, 0, 1, -1, -2, 3, 2**63 - 1))) for _ in range(2))
    return Use(aten.slice.Tensor, (x, dim, start, end, draw(st.integers(1, 3))))


@st.composite
def slice_scatter(draw: st.DrawFn) -> Use:
    x = draw(tensors(shapes(1, 3)))
    dim = dim_of(draw, x.dim())
    bounds = (
        draw(st.sampled_from((None, 0, 1, -1))),
        draw(st.sampled_from((None, 1, 2, -1, 2**63 - 1))),
        draw(st.integers(1, 2)),
    )
    source = draw(tensors(tuple(aten.slice.Tensor(x, dim, *bounds).shape)))
    return Use(aten.slice_scatter.default, (x, source, dim, *bounds))


@st.composite
def split(draw: st.DrawFn) -> Use:
    shape = list(draw(shapes(1, 3)))
    dim = dim_of(draw, len(shape))
    parts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    shape[dim] = sum(parts)
    return Use(aten.split_with_sizes.default, (draw(tensors(tuple(shape))), parts, dim))


@st.composite
def squeeze(draw: st.DrawFn) -> Use:
    shape = tuple(draw(st.sampled_from((1, 1, 2, 5))) for _ in range(draw(st.integers(1, 5))))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=3, unique=True))
    return Use(
        aten.squeeze.dims, (draw(tensors(shape)), [dim - draw(st.sampled_from((0, len(shape)))) for dim in dims])
    )


@st.composite
def sums(draw: st.DrawFn) -> Use:
    x = draw(tensors(dtype=draw(dtypes)))
    dims = draw(st.lists(st.integers(0, x.dim() - 1), min_size=1, max_size=2, unique=True))
    return Use(aten.sum.dim_IntList, (x, dims, draw(st.booleans())))


@st.composite
def unsqueeze(draw: st.DrawFn) -> Use:
    x = draw(tensors(shapes(0, 4), draw(dtypes)))
    return Use(aten.unsqueeze.default, (x, draw(st.integers(-x.dim() - 1, x.dim()))))


@st.composite
def nearest(draw: st.DrawFn) -> Use:
    x = draw(
        tensors((draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 20))))
    )
    if draw(st.booleans()):
        return Use(aten.upsample_nearest2d.vec, (x, [draw(st.integers(1, 40)), draw(st.integers(1, 40))], None))
    return Use(aten.upsample_nearest2d.vec, (x, None, [draw(st.sampled_from((1.0, 1.7, 2.0, 3.0))) for _ in range(2)]))


@st.composite
def view(draw: st.DrawFn) -> Use:
    shape = draw(st.one_of(shapes(1, 4), st.sampled_from(((0, 2, 3), (2, 0)))))
    total, target = math.prod(shape), []
    rest = total
    while rest > 1 and len(target) < 4:
        factor = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0][:6]))
        target.append(factor)
        rest //= factor
    target = [0, 3, 2] if total == 0 else [*target, rest]
    if total and draw(st.booleans()):
        target[draw(st.integers(0, len(target) - 1))] = -1
    return Use(aten.view.default, (draw(tensors(shape, draw(dtypes))), target))


@st.composite
def where(draw: st.DrawFn) -> Use:
    condition, left, right = draw(broadcastable(3))
    branches = [draw(tensors(shape, draw(dtypes))) for shape in (left, right)]
    return Use(aten.where.self, (draw(tensors(condition, torch.bool)), *branches))


@st.composite
def roi_align(draw: st.DrawFn) -> Use:
    channels = draw(st.sampled_from((1, 2, 3, 16, 24)))
    image = draw(tensors((draw(st.integers(1, 2)), channels, draw(st.integers(2, 20)), draw(st.integers(2, 20)))))
    boxes = _boxes(draw(st.integers(0, 4)), image.shape, torch.Generator().manual_seed(draw(seeds)))
    size = [draw(st.sampled_from((1, 2, 7))) for _ in range(2)]
    options = (draw(st.sampled_from((1.0, 0.5))), *size, draw(st.sampled_from((-1, -1, 2))), draw(st.booleans()))
    return Use(torch.ops.torchvision.roi_align.default, (image, boxes, *options))


@st.composite
def antialias(draw: st.DrawFn) -> Use:
    x = draw(tensors((draw(st.integers(1, 2)), draw(st.integers(1, 3)), *(draw(st.integers(2, 20)) for _ in range(2)))))
    size = [draw(st.integers(2, 24)) for _ in range(2)]  # PyTorch's own result for a width of 1 has equal rows
    return Use(aten._upsample_bilinear2d_aa.default, (x, size, draw(st.booleans())))


@st.composite
def along(draw: st.DrawFn, operator: Any, dtype: torch.dtype = torch.float32) -> Use:
    """A tensor, one of its dimensions, and whether it is kept."""
    x = draw(tensors(dtype=dtype))
    return Use(operator, (x, dim_of(draw, x.dim()), draw(st.booleans())))


@st.composite
def cumsum(draw: st.DrawFn) -> Use:
    x = draw(tensors(dtype=draw(dtypes)))
    return Use(aten.cumsum.default, (x, dim_of(draw, x.dim())))


@st.composite
def index(draw: st.DrawFn) -> Use:
    """Rows of a tensor, or elements at places along its first two dimensions."""
    x = draw(tensors(shapes(2, 4), draw(dtypes)))
    count = draw(st.integers(1, 5))
    places = [draw(tensors((count,), torch.int64, low=0, high=extent)) for extent in x.shape[: draw(st.integers(1, 2))]]
    return Use(aten.index.Tensor, (x, places))


@st.composite
def mean(draw: st.DrawFn) -> Use:
    x = draw(tensors())
    dims = draw(st.lists(st.integers(0, x.dim() - 1), min_size=1, max_size=2, unique=True))
    return Use(aten.mean.dim, (x, dims, draw(st.booleans())))


@st.composite
def mm(draw: st.DrawFn) -> Use:
    m, k, n = (draw(st.integers(1, 70)) for _ in range(3))
    return Use(aten.mm.default, (draw(tensors((m, k))), draw(tensors((k, n))) / math.sqrt(k)))


@st.composite
def with_number(draw: st.DrawFn, operator: Any) -> Use:
    """A comparison of a tensor with a number."""
    x = draw(tensors(dtype=draw(st.sampled_from((torch.float32, torch.int64))), low=0, high=3))
    return Use(operator, (x.round() if x.is_floating_point() else x, draw(st.sampled_from((0, 1, 2, 0.5)))))


USES: dict[str, st.SearchStrategy[Use]] = {
    "aten._upsample_bilinear2d_aa.default": antialias(),
    "aten.any.dim": along(aten.any.dim, torch.bool),
    "aten.argmax.default": along(aten.argmax.default),
    "aten.cumsum.default": cumsum(),
    "aten.eq.Scalar": with_number(aten.eq.Scalar),
    "aten.ge.Scalar": with_number(aten.ge.Scalar),
    "aten.gt.Scalar": with_number(aten.gt.Scalar),
    "aten.index.Tensor": index(),
    "aten.mean.dim": mean(),
    "aten.mm.default": mm(),
    "aten.neg.default": unary(aten.neg.default),
    "aten.pow.Tensor_Scalar": tensors().map(lambda x: Use(aten.pow.Tensor_Scalar, (x, 2))),
    "aten.sqrt.default": unary(aten.sqrt.default, low=0.0, high=9.0),
    "aten._softmax.default": softmax(),
    "aten._to_copy.default": to_copy(),
    "aten.abs.default": unary(aten.abs.default),
    "aten.add.Tensor": binary(aten.add.Tensor),
    "aten.addmm.default": addmm(),
    "aten.alias.default": unary(aten.alias.default),
    "aten.arange.start_step": arange(),
    "aten.bitwise_not.default": tensors(dtype=torch.bool).map(lambda x: Use(aten.bitwise_not.default, (x,))),
    "aten.bmm.default": bmm(),
    "aten.cat.default": cat(),
    "aten.clamp.default": clamp(),
    "aten.clone.default": unary(aten.clone.default),
    "aten.convolution.default": convolution(),
    "aten.copy.default": binary(aten.add.Tensor).map(
        lambda use: Use(aten.copy.default, (use.operator(*use.args), use.args[0]))
    ),
    "aten.cos.default": unary(aten.cos.default, scale=5.0),
    "aten.div.Tensor": binary(aten.div.Tensor, low=1, high=9),
    "aten.div.Tensor_mode": div_mode(),
    "aten.embedding.default": embedding(),
    "aten.expand.default": expand(),
    "aten.full.default": full(),
    "aten.full_like.default": full_like(),
    "aten.ge.Tensor": comparison(torch.ge),
    "aten.gelu.default": unary(aten.gelu.default, scale=3.0),
    "aten.grid_sampler_2d.default": grid_sample(),
    "aten.log.default": unary(aten.log.default, low=1e-4, high=20.0),
    "aten.log2.default": unary(aten.log2.default, low=1e-4, high=20.0),
    "aten.max_pool2d_with_indices.default": max_pool(),
    "aten.mul.Tensor": binary(aten.mul.Tensor),
    "aten.native_group_norm.default": group_norm(),
    "aten.native_layer_norm.default": layer_norm(),
    "aten.ne.Scalar": comparison(torch.ne),
    "aten.permute.default": permute(),
    "aten.pow.Scalar": tensors(low=-2.0, high=2.0).map(lambda x: Use(aten.pow.Scalar, (10000, x))),
    "aten.relu.default": unary(aten.relu.default),
    "aten.repeat.default": repeat(),
    "aten.scalar_tensor.default": scalar_tensor(),
    "aten.scaled_dot_product_attention.default": attention(),
    "aten.scatter.src": scatter(),
    "aten.select.int": select(),
    "aten.sigmoid.default": unary(aten.sigmoid.default, scale=5.0),
    "aten.sign.default": unary(aten.sign.default),
    "aten.sin.default": unary(aten.sin.default, scale=5.0),
    "aten.slice.Tensor": slices(),
    "aten.slice_scatter.default": slice_scatter(),
    "aten.split_with_sizes.default": split(),
    "aten.squeeze.dims": squeeze(),
    "aten.sub.Tensor": binary(aten.sub.Tensor),
    "aten.sum.dim_IntList": sums(),
    "aten.unsqueeze.default": unsqueeze(),
    "aten.upsample_nearest2d.vec": nearest(),
    "aten.view.default": view(),
    "aten.where.self": where(),
    "torchvision.roi_align.default": roi_align(),
}
"""For each operator in fixtures/operators.json, calls of it of any shape."""


def test_every_operator_has_a_strategy() -> None:
    assert set(CALLS) - set(CHECKS) == set(USES)


@pytest.mark.parametrize("first", range(0, len(USES), TOGETHER), ids=[*USES][::TOGETHER])
def test_operators(first: int) -> None:
    names = [*USES][first : first + TOGETHER]
    check([use for name in names for use in (*recorded(name, 8), *drawn(USES[name], 16))], [unoptimized()])


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in USES if _affordable(name)])
def test_recorded_calls(name: str) -> None:
    check(recorded(name, MANY), targets())


@pytest.mark.wide
@pytest.mark.parametrize("name", USES)
def test_any_shape(name: str) -> None:
    check(drawn(USES[name], MANY), targets())
