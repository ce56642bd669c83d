"""Rotates queries and keys by one operator: the torch operator, and its kernel in TensorIR.

The kernel is plain loops over blocks. A target schedules it like any other kernel, or folds it into the reader of its
results, which it recognizes by the attribute `ROTATES_PAIRS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.rope.real import check_table
from harness.compiler.lowering.rope.real import rotate as rotate_real
from harness.compiler.lowering.rotation import Tables

if TYPE_CHECKING:
    from torch.fx import Node
    from tvm import relax, tirx

OPERATOR = "rotate_pairs.default"
"""The operator's name in TVM's importer."""


@torch.library.custom_op("sam3_tvm::rotate_pairs", mutates_args=())
def _rotate(tokens: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    """Rotates tensors [..., n·L, D], each with its own n, by the angles of tables [L, D/2]."""
    return [rotate_real(x, cos, sin, x.shape[-2] // len(cos)) for x in tokens]


@_rotate.register_fake
def _rotated(tokens: Sequence[torch.Tensor], _cos: torch.Tensor, _sin: torch.Tensor) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in tokens]


def rotate(q: torch.Tensor, k: torch.Tensor, tables: Tables, repeat: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates each pair of neighbouring features of queries and keys by its token's angle, as one operator.

    Args:
        q: Queries, [..., L, D] in any floating dtype.
        k: Keys, [..., repeat·L, D]; queries or keys without tokens are returned unchanged.
        tables: Cosines and sines, each [L, D/2].
        repeat: Number of repetitions of the tables along the keys.

    Raises:
        ValueError: The tables do not fit.
    """
    cos, sin = tables
    for x, times in ((q, 1), (k, repeat)):
        check_table(x, cos, times)
    filled = [x for x in (q, k) if x.shape[-2]]
    rotated = iter(_rotate(filled, cos, sin) if filled else ())
    return next(rotated) if q.shape[-2] else q, next(rotated) if k.shape[-2] else k


def convert(node: Node, importer: Any) -> relax.Expr:
    """Converts the operator to one Relax call of the kernel."""
    from tvm import relax

    tokens, cos, sin = node.args
    assert isinstance(tokens, list | tuple)
    operands = [importer.env[operand] for operand in (*tokens, cos, sin)]
    arguments = [(tuple(int(extent) for extent in x.ty.shape), str(x.ty.dtype)) for x in operands]
    function = importer.block_builder.add_func(kernel(arguments[:-2], *arguments[-2:]), "rotate_pairs")
    results = [x.ty for x in operands[:-2]]
    rotated = importer.block_builder.emit(relax.call_tir(function, operands, out_ty=results))
    return rotated if len(results) > 1 else relax.Tuple([rotated])


Parameter = tuple[tuple[int, ...], str]
"""Shape and dtype."""


def kernel(tokens: Sequence[Parameter], cos: Parameter, sin: Parameter) -> tirx.PrimFunc:
    """Builds the TensorIR function of tensors [..., n·L, D] and tables [L, D/2]; its last parameters are the results.

    Every tensor is read and written once, a pair at a time; tensors of one shape share a loop, and so their reads of
    the tables. The arithmetic is float32, as upstream's, and float64 for float64 tensors.
    """
    from harness.compiler import tir as T
    from harness.compiler.schedules.common.folding import ROTATES_PAIRS

    with T.IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name("rotate_pairs")
            T.func_attr({"tirx.noalias": True, ROTATES_PAIRS: True})
            parameters = [*((f"x{n}", x) for n, x in enumerate(tokens)), ("cos", cos), ("sin", sin)]
            *sources, cosines, sines = (T.arg(name, T.buffer(*parameter)) for name, parameter in parameters)
            results = [T.arg(f"rotated{n}", T.buffer(*parameter)) for n, parameter in enumerate(tokens)]
            for number, shape in enumerate(dict.fromkeys(shape for shape, _ in tokens)):
                same_shape = [pair for pair in zip(sources, results, strict=True) if _shape(pair[0]) == shape]
                # Schedules find blocks by name, so names are unique.
                _loops(shape, same_shape, cosines, sines, f"rotated_{number}")
        return builder.get()


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)


def _loops(shape: tuple[int, ...], pairs: Sequence[Any], cosines: tirx.Buffer, sines: tirx.Buffer, block: str) -> None:
    """Emits the rotations of pairs (source, result) of one shape, as a block with the given name."""
    from harness.compiler import tir as T

    positions = int(cosines.shape[0])
    with T.grid(*shape[:-1], shape[-1] // 2) as loops, T.sblock(block):
        *around, token, pair = T.axis.remap("S" * len(shape), loops)
        position = token % positions if shape[-2] != positions else token
        for source, result in pairs:
            dtype = "float64" if str(source.dtype) == "float64" else "float32"
            cos, sin = (table[position, pair].astype(dtype) for table in (cosines, sines))
            places = [(*around, token, pair * 2 + n) for n in range(2)]
            re, im = (source[place].astype(dtype) for place in places)
            for place, value in zip(places, (re * cos - im * sin, re * sin + im * cos), strict=True):
                T.buffer_store(result, value.astype(str(source.dtype)), list(place))
