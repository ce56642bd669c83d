"""Every distinct kernel of SAM 3 as a PyTorch module with inputs, from the recorded calls of the components.

Left out, because they are not kernels of their own:

- calls of an empty tensor, and calls other than products, convolutions and attention that move less than
  `LEAST_MOVED` bytes: their time is that of a function call;
- views that move nothing (reshapes, contiguous slices, …); a view that a component reads in another order, a
  permutation or a strided slice, is measured together with the copy that it costs;
- `clone`, which makes such a copy, and `expand`, which no component writes out;
- repetitions by 1 and concatenations of a single tensor: they compile to nothing;
- two-dimensional transpositions: those of weights, done when a model is loaded.

Calls that are the same work are merged: elementwise operations of one size, permutations that differ in dimensions of
extent 1 or in dimensions that stay neighbours, and so on.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import torch
import torchvision  # noqa: F401  (registers torchvision::roi_align)
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from harness.core.settings import FIXTURES

LEAST_MOVED = 1_000_000
"""Bytes below which a memory-bound kernel is left out."""

Bound = Literal["compute", "memory"]
Shape = tuple[int, ...]


class Group(StrEnum):
    """What a kernel is listed under; the first three have goals of their own."""

    VIT_LINEAR = "linear layers of the ViT"
    CONV_3X3 = "3×3 convolutions of neck and pixel decoder"
    VIT_ATTENTION = "attention, windowed and global"
    LINEAR = "other linear layers"
    PRODUCT = "products of activations"
    CONVOLUTION = "other convolutions"
    ATTENTION = "other attention"
    NORMALIZATION = "normalization and softmax"
    ELEMENTWISE = "elementwise"
    MOVEMENT = "data movement"


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        group: What it is listed under.
        name: The operation.
        shape: Its extents, to be read.
        make: Seed → module with weights, and inputs.
        moved: Bytes read and written at least, each operand once.
    """

    group: Group
    name: str
    shape: str
    make: Callable[[torch.Generator], tuple[nn.Module, tuple[torch.Tensor, ...]]]
    moved: int

    @property
    def bound(self) -> Bound:
        """Whether its rate is counted in operations or in bytes."""
        memory = (Group.NORMALIZATION, Group.ELEMENTWISE, Group.MOVEMENT)
        return "memory" if self.group in memory else "compute"

    @property
    def id(self) -> str:
        """Unique name for pytest, of what its `-k` takes."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.name}-{self.shape}".replace("×", "x"))


def flop(module: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """Floating-point operations of products, convolutions and attention, as torch.utils.flop_counter counts them.

    Counted on meta tensors, where attention is a pair of products, masked scores included; a bias, an activation or a
    softmax counts nothing.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(module).to("meta")(*(tensor.to("meta") for tensor in inputs))
    return int(counter.get_total_flops())


def operator_calls() -> dict[str, list[list[Any]]]:
    """The distinct [positional, keyword] arguments of SAM 3's components by operator."""
    calls: dict[str, list[list[Any]]]
    calls = json.loads((FIXTURES / "operators.json").read_text(encoding="utf-8"))["operators"]
    return calls


def kernels() -> list[Kernel]:
    """All of them, by group."""
    found = dict(_vit_chains())
    for operator, calls in operator_calls().items():
        recognize = _COMPUTE.get(operator, _memory)
        for args, kwargs in calls:
            for key, kernel in recognize(operator, args, kwargs):
                found.setdefault(repr(key), kernel)
    order = list(Group)
    return sorted(found.values(), key=lambda kernel: order.index(kernel.group))


Found = Iterator[tuple[Any, Kernel]]
"""What makes two calls the same work, and the kernel; nothing if the call is left out."""


# Modules


class Chain(nn.Module):
    """A linear layer with what always follows it in a ViT block: GELU, or the sum with the residual stream."""

    def __init__(self, linear: nn.Linear, follower: Literal["gelu", "residual"]) -> None:
        super().__init__()
        self.linear, self.follower = linear, follower

    def forward(self, x: torch.Tensor, *residual: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return nn.functional.gelu(y) if self.follower == "gelu" else residual[0] + y


class ExpandedProduct(nn.Module):
    """What PyTorch makes of a linear layer on a strided input: a batched product with an expanded weight."""

    def __init__(self, weight: torch.Tensor, batch: int) -> None:
        super().__init__()
        self.weight, self.batch = nn.Parameter(weight), batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.weight.t().expand(self.batch, -1, -1))


class Call(nn.Module):
    """A recorded call: tensors come in by position, or are parameters; a tuple of results is cut to its first.

    Where the operator returns a view that is not contiguous, it is written out.
    """

    def __init__(self, operator: Callable[..., Any], leaves: list[Any], structure: Any, held: Sequence[int]) -> None:
        super().__init__()
        self.operator, self.structure = operator, structure
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and n not in held]
        self.held = list(held)
        self.weights = nn.ParameterList([nn.Parameter(leaves[n]) for n in held])

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        leaves = list(self.leaves)
        for places, values in ((self.places, tensors), (self.held, self.weights)):
            for place, value in zip(places, values, strict=True):
                leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.operator(*args, **kwargs)
        first: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return first.contiguous()


# Products, convolutions, attention


def _vit_chains() -> Found:
    tokens, width, hidden = 5184, 1024, 4736
    for name, columns, depth, follower in (
        ("qkv", 3 * width, width, None),
        ("proj", width, width, None),
        ("fc1 + gelu", hidden, width, "gelu"),
        ("fc2 + residual", width, hidden, "residual"),
    ):
        kernel = _linear(Group.VIT_LINEAR, name, tokens, depth, columns, follower)
        yield repr(("linear", tokens, depth, columns, follower)), kernel


def _linear(group: Group, name: str, rows: int, depth: int, columns: int, follower: Any = None) -> Kernel:
    def make(generator: torch.Generator) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        linear = nn.Linear(depth, columns)
        with torch.no_grad():
            linear.weight.copy_(_normal((columns, depth), generator) / math.sqrt(depth))
            linear.bias.copy_(_normal((columns,), generator))
        inputs = [_normal((rows, depth), generator)]
        if follower == "residual":
            inputs.append(_normal((rows, columns), generator))
        return (linear if follower is None else Chain(linear, follower)), tuple(inputs)

    elements = rows * depth + depth * columns + columns + rows * columns * (2 if follower == "residual" else 1)
    return Kernel(group, name, f"{rows}×{depth} · {depth}×{columns}", make, 4 * elements)


def _addmm(_operator: str, args: list[Any], _kwargs: Any) -> Found:
    (rows, depth), (_, columns) = args[1]["shape"], args[2]["shape"]
    if rows:
        yield ("linear", rows, depth, columns, None), _linear(Group.LINEAR, "linear", rows, depth, columns)


def _bmm(_operator: str, args: list[Any], _kwargs: Any) -> Found:
    left, right = (tuple(argument["shape"]) for argument in args)
    batch, rows, depth = left
    columns = right[2]
    if not math.prod(left) * math.prod(right):
        return
    shape = f"{batch} × {rows}×{depth} · {depth}×{columns}"
    output = batch * rows * columns
    if right in _expanded():

        def make_expanded(generator: torch.Generator) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
            weight = _normal((columns, depth), generator) / math.sqrt(depth)
            return ExpandedProduct(weight, batch), (_normal(left, generator),)

        moved = 4 * (math.prod(left) + depth * columns + output)
        yield ("bmm", left, right), Kernel(Group.LINEAR, "linear, expanded", shape, make_expanded, moved)
        return
    make = _maker("aten.bmm.default", args, {})
    moved = 4 * (math.prod(left) + math.prod(right) + output)
    yield ("bmm", left, right), Kernel(Group.PRODUCT, "bmm", shape, make, moved)


def _expanded() -> set[Shape]:
    """Shapes that a matrix is expanded to: operands of batched products that are really one weight."""
    calls = operator_calls()["aten.expand.default"]
    return {tuple(args[1]) for args, _ in calls if len(args[0]["shape"]) == 2 and len(args[1]) == 3}


def _convolution(operator: str, args: list[Any], kwargs: Any) -> Found:
    image, weight = args[0]["shape"], args[1]["shape"]
    if 0 in image:
        return
    kernel, strides, transposed, groups = weight[2:], args[3], args[6], args[8]
    group = Group.CONV_3X3 if kernel == [3, 3] else Group.CONVOLUTION
    name = f"conv {'×'.join(map(str, kernel))}"
    name += " depthwise" if groups == image[1] > 1 else ""
    name += f" stride {strides[0]}" if strides[0] != 1 else ""
    name += " transposed" if transposed else ""
    filters = weight[1] * groups if transposed else weight[0]
    shape = f"{'×'.join(map(str, image))} → {filters}"
    held = [1] if args[2] is None else [1, 2]
    yield (
        (operator, repr(args)),
        Kernel(group, name, shape, _maker(operator, args, kwargs, held), _moved(operator, args, kwargs)),
    )


def _attention(operator: str, args: list[Any], kwargs: Any) -> Found:
    query, key = args[0]["shape"], args[1]["shape"]
    if 0 in query + key:
        return
    batch, heads, length, channels = query
    of_vit = length == key[2] and batch * length == 5184 and channels == 64
    mask = " + mask" if len(args) > 3 and args[3] is not None else ""
    shape = f"{batch}×{heads} × {length}×{key[2]}×{channels}{mask}"
    group = Group.VIT_ATTENTION if of_vit else Group.ATTENTION
    name = {576: "windowed", 5184: "global"}[length] if of_vit else "attention"
    yield (
        (operator, repr(args)),
        Kernel(group, name, shape, _maker(operator, args, kwargs), _moved(operator, args, kwargs)),
    )


_COMPUTE: dict[str, Callable[[str, list[Any], Any], Found]] = {
    "aten.addmm.default": _addmm,
    "aten.bmm.default": _bmm,
    "aten.convolution.default": _convolution,
    "aten.scaled_dot_product_attention.default": _attention,
}


# What memory limits

_NORMALIZATION = {"native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "_softmax": "softmax"}
_MOVEMENT = ("cat", "copy", "max_pool2d_with_indices", "repeat", "slice_scatter", "upsample_nearest2d")
_GATHERS = ("embedding", "grid_sampler_2d", "roi_align")
"""They read as much of their first operand as they write, not all of it."""
_NOT_KERNELS = ("_assert_tensor_metadata", "clone", "expand")
_COMPARISONS = ("eq", "ge", "gt")
"""They are the same work whatever number they compare with."""
_WEIGHTS = {"native_layer_norm": (2, 3), "native_group_norm": (1, 2), "embedding": (0,)}
"""Which arguments are weights."""


def _memory(operator: str, args: list[Any], kwargs: Any) -> Found:
    packet = operator.split(".")[1]
    shapes = [tuple(leaf["shape"]) for leaf in _leaves(args, kwargs)[0] if _is_tensor(leaf)]
    of_weights = packet == "permute" and len(shapes[0]) == 2
    nothing = (packet == "repeat" and set(args[1]) == {1}) or (packet == "cat" and len(args[0]) == 1)
    if packet in _NOT_KERNELS or of_weights or nothing or (moved := _moved(operator, args, kwargs)) < LEAST_MOVED:
        return
    make = _maker(operator, args, kwargs, _WEIGHTS.get(packet, ()))
    text = ", ".join(_extents(shape, keep_ones=len(set(shapes)) > 1) for shape in shapes)
    scalars = (
        "" if packet in _COMPARISONS else repr([leaf for leaf in _leaves(args, kwargs)[0] if not _is_tensor(leaf)])
    )
    if packet in _NORMALIZATION:
        name = _NORMALIZATION[packet]
        key: Any = (math.prod(shapes[0]), shapes[1]) if name == "layer_norm" else (shapes[0], scalars)
        yield (name, key), Kernel(Group.NORMALIZATION, name, _extents(shapes[0]), make, moved)
    elif _is_view(operator):
        result = _on_meta(operator, args, kwargs)
        text += f" → {_extents(tuple(result.shape))}"
        yield (packet, _layout(result)), Kernel(Group.MOVEMENT, packet, text, make, moved)
    elif packet in _MOVEMENT or packet in _GATHERS:
        if packet == "repeat":
            text += f" → {_extents(tuple(_on_meta(operator, args, kwargs).shape))}"
        yield (packet, shapes, scalars), Kernel(Group.MOVEMENT, packet, text, make, moved)
    else:
        yield (packet, _coalesced(shapes), scalars), Kernel(Group.ELEMENTWISE, packet, text, make, moved)


def _coalesced(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Broadcast operands with dimensions that all of them treat alike put together."""
    rank = max(map(len, shapes))
    columns = list(zip(*[(1,) * (rank - len(shape)) + shape for shape in shapes], strict=True))
    merged: list[list[int]] = []
    before: list[bool] | None = None
    for column in columns:
        broadcast = [extent == 1 for extent in column]
        if all(broadcast):
            continue
        if broadcast == before:
            merged[-1] = [a * b for a, b in zip(merged[-1], column, strict=True)]
        else:
            merged.append(list(column))
        before = broadcast
    return tuple(zip(*merged, strict=True))


def _layout(view: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Extent and stride of each dimension, those put together that are one."""
    result: list[tuple[int, int]] = []
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        if extent == 1:
            continue
        if result and result[-1][1] == extent * stride:
            result[-1] = (result[-1][0] * extent, stride)
        else:
            result.append((extent, stride))
    return tuple(result)


# Recorded calls


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "shape" in value


def _leaves(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten((args, kwargs), is_leaf=_is_tensor)


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _is_view(operator: str) -> bool:
    return any(result.alias_info is not None for result in _operator(operator)._schema.returns)


def _plain(leaf: Any) -> Any:
    """An argument that is no tensor, from its text."""
    if isinstance(leaf, str) and leaf.startswith("torch."):
        return getattr(torch, leaf.removeprefix("torch."))
    return float(leaf) if leaf in ("inf", "-inf", "nan") else leaf


def _on_meta(operator: str, args: Any, kwargs: Any) -> torch.Tensor:
    """The call's first result, without values."""
    leaves, structure = _leaves(args, kwargs)
    revived = [
        torch.empty(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device="meta")
        if _is_tensor(leaf)
        else _plain(leaf)
        for leaf in leaves
    ]
    positional, named = pytree.tree_unflatten(revived, structure)
    result = _operator(operator)(*positional, **named)
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result


def _moved(operator: str, args: Any, kwargs: Any) -> int:
    """Bytes of the operands and of the first result; a view that is contiguous moves nothing."""
    tensors = [leaf for leaf in _leaves(args, kwargs)[0] if _is_tensor(leaf)]
    if not tensors or any(0 in leaf["shape"] for leaf in tensors):
        return 0
    result = _on_meta(operator, args, kwargs)
    written: int = result.numel() * result.itemsize
    if _is_view(operator):
        return 0 if result.is_contiguous() else 2 * written
    if operator.split(".")[1] in _GATHERS:
        return 2 * written
    read: int = sum(math.prod(leaf["shape"]) * getattr(torch, leaf["dtype"]).itemsize for leaf in tensors)
    return read + written


def _maker(
    operator: str, args: Any, kwargs: Any, weights: Sequence[int] = ()
) -> Callable[[torch.Generator], tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """How a recorded call gets its tensors; those of the arguments `weights` are parameters of the module."""
    places = {place for place, argument in enumerate(args) if _is_tensor(argument)}
    assert places.issuperset(weights), operator

    def make(generator: torch.Generator) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        values: list[Any] = []
        inputs: list[torch.Tensor] = []
        held: list[int] = []
        leaves, structure = _leaves(args, kwargs)
        below = _least_indexed(args) if operator == "aten.index.Tensor" else 2
        for leaf in leaves:
            if not _is_tensor(leaf):
                values.append(_plain(leaf))
                continue
            tensor = _values(leaf["shape"], leaf["dtype"], generator, below)
            if any(leaf is args[weight] for weight in weights):
                held.append(len(values))
            else:
                inputs.append(tensor)
            values.append(tensor)
        if operator == "aten.convolution.default":
            values[1] /= math.sqrt(math.prod(values[1].shape[1:]))
        if operator == "aten.bmm.default":
            values[1] /= math.sqrt(values[1].shape[1])
        return Call(_operator(operator), values, structure, held), tuple(inputs)

    return make


def _least_indexed(args: Any) -> int:
    """Returns the least extent of a dimension that a tensor indexes, or 2: integers are no larger."""
    source, indices = args
    extents: list[int] = [extent for extent, index in zip(source["shape"], indices, strict=False) if _is_tensor(index)]
    return min(2, *extents)


def _values(shape: Sequence[int], dtype: str, generator: torch.Generator, below: int) -> torch.Tensor:
    if dtype == "float32":
        return _normal(shape, generator)
    return torch.randint(0, below, tuple(shape), generator=generator).to(getattr(torch, dtype))


def _normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator)


def _extents(shape: Shape, *, keep_ones: bool = False) -> str:
    """As text, without the dimensions of extent 1 unless they say what is broadcast."""
    return "×".join(str(extent) for extent in shape if keep_ones or extent != 1) or "1"
