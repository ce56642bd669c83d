"""Rotates by axial RoPE as two one-dimensional RoPEs with position maps: the torch operator, and TVM's rotation.

TVM's `llama_rope_with_position_map` computes cosines and sines itself, from integer positions, in an order of
operations that differs from upstream's, for every element of every head. Here cosines and sines are read from
upstream's own tables; of TVM's function only the rotation remains, from pairing to casts. `docs/evidence/rope.md`
has the reasons.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.rope.real import axial_tables
from harness.compiler.lowering.rope.real import rotate as rotate_pairs

if TYPE_CHECKING:
    from torch.fx import Node
    from tvm.ir import Expr

OPERATOR = "rotate_with_position_map.default"
"""The operator's name in TVM's importer."""


def from_table(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a complex axial table into position maps and a one-dimensional table, without rounding.

    Args:
        table: e^(i·angle), [L, D/2]: D/4 pairs of the first axis, D/4 of the second.

    Returns:
        The position maps [L, 2], int32, row of the table by token and axis; and the table [P, D/4, 2] of P different
        positions, cosines and sines.
    """
    tokens, pairs = table.shape
    rows = torch.view_as_real(table.resolve_conj()).reshape(2 * tokens, -1)
    positions, places = torch.unique(rows, dim=0, return_inverse=True)
    return places.reshape(tokens, 2).to(torch.int32), positions.reshape(len(positions), pairs // 2, 2)


def axial(head_size: int, width: int, height: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes position maps and table of a grid with positions 0, 1, 2, … along each axis, in upstream's float32."""
    token = torch.arange(width * height)
    maps = torch.stack((token % width, token // width), dim=-1).to(torch.int32)
    cos, sin = axial_tables(head_size, max(width, height), 1, theta)
    return maps, torch.stack((cos, sin), dim=-1)[:, : head_size // 4]


@torch.library.custom_op("sam3_tvm::rotate_with_position_map", mutates_args=())
def _rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates x [..., repeat·L, D] by the angles of its tokens' two positions, in float32 as upstream does."""
    cos, sin = table[positions.long()].flatten(1, 2).unbind(-1)
    return rotate_pairs(x.float(), cos, sin, x.shape[-2] // len(positions)).to(x.dtype)


@_rotate.register_fake
def _rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    """Rotates each pair of neighbouring features by its token's angle, as one operator in the exported graph.

    Args:
        x: Queries or keys, [..., repeat·L, D] in any floating dtype; returned unchanged if they have no tokens.
        positions: Rows of the table by token and axis, [L, 2], int32.
        table: Cosines and sines by position and frequency, [P, D/4, 2].
        repeat: Number of repetitions of the position maps along the tokens.

    Raises:
        ValueError: The tokens are not `repeat` times the position maps, or the features not four times the table's.
    """
    tokens, features = x.shape[-2:]
    if tokens == 0:
        return x
    if tokens != repeat * len(positions) or features != 4 * table.shape[1]:
        raise ValueError(
            f"RoPE position maps of {len(positions)} tokens, repeated {repeat} times, and a table of "
            f"{table.shape[1]} frequencies do not fit {tokens} tokens of {features} features"
        )
    rotated: torch.Tensor = _rotate(x, positions, table)
    return rotated


def convert(node: Node, importer: Any) -> Expr:
    """Converts the operator to one Relax call of a function with TVM's rotation inside."""
    from tvm import relax

    emit = importer.block_builder.emit
    x, positions, table = (importer.env[operand] for operand in node.args)
    shape = [int(size) for size in x.ty.shape]
    tokens, features = int(positions.ty.shape[0]), shape[-1]
    rows = math.prod(shape[:-1]) // tokens
    halves = emit(relax.op.reshape(x, [rows, tokens, 2, features // 2]))
    rotated = importer.block_builder.emit_te(_compute, halves, positions, table, primfunc_name_hint="axial_rope")
    return emit(relax.op.reshape(rotated, shape))


def _compute(x: Any, positions: Any, table: Any) -> Any:
    """Rotates each half of x [rows, L, 2, F] by TVM's RoPE; positions are [L, 2], the table is [P, F/2, 2]."""
    from tvm import te

    def element(row: Any, token: Any, axis: Any, feature: Any) -> Any:
        position = positions[token, axis]
        return llm_rotation(
            lambda index: x[row, token, axis, index],
            feature,
            lambda part: table[position, feature // 2, part],
            int(x.shape[-1]),
            str(x.dtype),
        )

    return te.compute(x.shape, element, name="axial_rope")


@cache
def _rotated_feature(features: int, dtype: str) -> tuple[Any, Any]:
    """Returns the rotated feature in TVM's function, and the variable of the feature's index.

    Args:
        features: Size of the head that TVM's function rotates.
        dtype: Element type of the features.
    """
    import tvm_ffi
    from tvm import s_tir, tirx
    from tvm.relax.frontend.nn.llm.position_embedding import llama_rope_with_position_map

    # theta and scale only matter to the angle, which is replaced
    kernel = llama_rope_with_position_map(
        theta=1.0,
        scale=1.0,
        head_dim=features,
        num_q_heads=1,
        num_kv_heads=0,
        dtype=dtype,
        rope_scaling={"rope_type": "gptj"},
    )
    stores: list[Any] = []
    blocks: list[Any] = []

    def collect(part: Any) -> None:
        if isinstance(part, tirx.BufferStore) and part.buffer.name == "q":
            stores.append(part)
        elif isinstance(part, s_tir.SBlock) and part.iter_vars:
            blocks.append(part)

    tvm_ffi.structural_walk(kernel.body, collect)
    (store,), (block,) = stores, blocks
    _, rotated, _ = store.value.args  # condition, rotated feature, unrotated feature
    *_, feature = (axis.var for axis in block.iter_vars)
    return rotated, feature


def llm_rotation(load: Any, feature: Any, turn: Any, features: int, dtype: str) -> Any:
    """Returns TVM's expression of one rotated feature, with operands, cosine and sine from the given functions.

    Args:
        load: Takes the index of a feature, returns the feature of this token and head.
        feature: Index of the feature to compute.
        turn: Takes 0 or 1, returns the cosine or sine of this token's angle at the feature's frequency.
        features: Size of the head that TVM's function rotates.
        dtype: Element type of the features.
    """
    from tvm import ir, tirx

    rotated, original_feature = _rotated_feature(features, dtype)

    def rebuild(part: Any) -> Any:
        if isinstance(part, tirx.Let):  # binds the angle, which only cosine and sine read
            return rebuild(part.body)
        if isinstance(part, ir.TensorLoad) and part.source.name == "qkv":
            return load(rebuild(part.indices[-1]))
        if isinstance(part, ir.Call) and part.op.name in ("tirx.cos", "tirx.sin"):
            return turn(0 if part.op.name == "tirx.cos" else 1)
        if isinstance(part, ir.Call) and part.op.name == "prim.if_then_else":
            return tirx.if_then_else(*map(rebuild, part.args))
        if isinstance(part, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorMod | tirx.EQ):
            return type(part)(rebuild(part.a), rebuild(part.b))
        if isinstance(part, tirx.Cast):
            return tirx.Cast(part.ty, rebuild(part.value))
        if isinstance(part, tirx.IntImm):  # TVM's function counts in int32, Relax in int64
            return tirx.IntImm("int64", part.value)
        if isinstance(part, ir.Var) and part.same_as(original_feature):
            return feature
        if isinstance(part, tirx.FloatImm):
            return part
        raise NotImplementedError(f"TVM's RoPE contains {part}, which it did not in the tested version")

    return rebuild(rotated)
