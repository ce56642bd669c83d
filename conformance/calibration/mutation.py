"""Changes of one expression or loop of a compiled function, whatever it computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx

_LARGEST = 1e38
"""Constants that are larger stand for the largest number, of which there is no 1 % more."""

RACE = "memory shared by tasks"

Change = Callable[[Any], Any]
"""Takes a node; returns the changed one, or None where there is nothing to change."""


@dataclass(frozen=True)
class Mutation:
    """A way to be wrong: the types of the nodes that it changes, and how."""

    types: tuple[type, ...]
    change: Change


def mutated(function: tirx.PrimFunc, kind: str, site: float) -> tirx.PrimFunc | None:
    """Returns the function with one node changed, or None where it has no such node.

    Args:
        function: The function.
        kind: Key of `MUTATIONS`.
        site: Which of the nodes that can be changed: a part of 1.
    """
    _, count = _replaced(function, MUTATIONS[kind], -1)
    return _replaced(function, MUTATIONS[kind], int(site * count))[0] if count else None


def _replaced(function: tirx.PrimFunc, mutation: Mutation, chosen: int) -> tuple[tirx.PrimFunc, int]:
    seen = 0

    def visit(node: Any) -> Any:
        nonlocal seen
        changed = mutation.change(node)
        if changed is None:
            return node
        seen += 1
        return changed if seen - 1 == chosen else node

    return function.with_body(tvm_ffi.structural_map(function.body, (mutation.types, visit))), seen


def _is_float(value: Any) -> bool:
    return str(value.ty.dtype).startswith("float")


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, ir.Call) and getattr(node.op, "name", "") == name


def _constant(node: tirx.FloatImm) -> Any:
    value = float(node.value)
    able = value and abs(value) < _LARGEST
    return tirx.FloatImm(str(node.ty.dtype), 1.01 * value) if able else None


def _next(indices: Any, buffer: Any) -> list[Any] | None:
    """Returns the index of the next element along the last axis that has several; the last one stays where it is."""
    changed = list(indices)
    for axis in reversed(range(len(changed))):
        extent = buffer.ty.shape[axis]
        if isinstance(extent, tirx.IntImm) and int(extent) > 1:
            changed[axis] = tirx.min(changed[axis] + 1, int(extent) - 1)
            return changed
    return None


def _read_elsewhere(node: ir.TensorLoad) -> Any:
    indices = _next(node.indices, node.source)
    return None if indices is None else tirx.BufferLoad(node.source, indices)


def _stored_elsewhere(node: tirx.BufferStore) -> Any:
    indices = _next(node.indices, node.buffer)
    return None if indices is None else tirx.BufferStore(node.buffer, node.value, indices)


def _swapped(node: Any) -> Any:
    return type(node)(node.b, node.a) if _is_float(node) else None


def _without_term(node: Any) -> Any:
    if isinstance(node, tirx.Add):
        return node.a if _is_float(node) else None
    return node.args[0] * node.args[1] if _is_call(node, "tirx.fma") else None


def _shorter(node: tirx.For) -> Any:
    kind = tirx.ForKind(node.kind)
    if kind is tirx.ForKind.VECTORIZED or not isinstance(node.extent, tirx.IntImm) or int(node.extent) < 2:
        return None
    return _loop(node, tirx.IntImm(str(node.extent.ty.dtype), int(node.extent) - 1), node.body)


def _loop(node: tirx.For, extent: Any, body: Any) -> tirx.For:
    return tirx.For(
        node.loop_var, node.min, extent, node.kind, body, node.thread_binding, node.annotations, node.step, node.span
    )


def _shared(node: tirx.For) -> Any:
    """Moves the memory that each iteration of a parallel loop has for itself out of the loop."""
    parts = list(node.body.seq) if isinstance(node.body, tirx.SeqStmt) else []
    own = [part for part in parts if isinstance(part, tirx.AllocBuffer)]
    if tirx.ForKind(node.kind) is not tirx.ForKind.PARALLEL or not own:
        return None
    body = tirx.SeqStmt([part for part in parts if not isinstance(part, tirx.AllocBuffer)])
    return tirx.SeqStmt([*own, _loop(node, node.extent, body)])


def _begun_with(value: float) -> Change:
    def change(node: tirx.BufferStore) -> Any:
        if not isinstance(node.value, tirx.FloatImm) or float(node.value.value) != 0.0:
            return None
        return tirx.BufferStore(node.buffer, tirx.FloatImm(str(node.value.ty.dtype), value), node.indices)

    return change


def _stored(change: Change) -> Change:
    def changed(node: tirx.BufferStore) -> Any:
        if str(node.value.ty.dtype) != "float32" or isinstance(node.value, tirx.FloatImm):
            return None
        return tirx.BufferStore(node.buffer, change(node.value), node.indices)

    return changed


def _to_float16(value: Any) -> Any:
    return tirx.Cast("float32", tirx.Cast("float16", value))


def _to_bfloat16(value: Any) -> Any:
    bits = tirx.bitwise_and(tirx.reinterpret("int32", value), tirx.const(-(1 << 16), "int32"))
    return tirx.reinterpret("float32", bits)


def _times(factor: float) -> Change:
    return lambda value: value * tirx.const(factor, "float32")


def _otherwise(node: Any) -> Any:
    if isinstance(node, tirx.Select):
        return tirx.Select(node.condition, node.false_value, node.true_value)
    if isinstance(node, tirx.Max | tirx.Min):
        return (tirx.Min if isinstance(node, tirx.Max) else tirx.Max)(node.a, node.b) if _is_float(node) else None
    if _is_call(node, "prim.if_then_else"):
        return tirx.if_then_else(tirx.Not(node.args[0]), node.args[1], node.args[2])
    return None


def _unconditionally(node: Any) -> Any:
    if isinstance(node, tirx.Select):
        return node.false_value
    return node.args[1] if _is_call(node, "prim.if_then_else") else None


_CHOICES = (tirx.Select, tirx.Max, tirx.Min, ir.Call)

FACTORS = {f"factor 1 + 1e-{k}": Mutation((tirx.BufferStore,), _stored(_times(1 + 10**-k))) for k in range(2, 8)}

MUTATIONS = {
    "wrong constant": Mutation((tirx.FloatImm,), _constant),
    "wrong element read": Mutation((ir.TensorLoad,), _read_elsewhere),
    "wrong element written": Mutation((tirx.BufferStore,), _stored_elsewhere),
    "swapped operands": Mutation((tirx.Sub, tirx.Div), _swapped),
    "dropped term": Mutation((tirx.Add, ir.Call), _without_term),
    "loop ends early": Mutation((tirx.For,), _shorter),
    RACE: Mutation((tirx.For,), _shared),
    "begun with NaN": Mutation((tirx.BufferStore,), _begun_with(math.nan)),
    "begun with what was there": Mutation((tirx.BufferStore,), _begun_with(0.5)),
    "rounded to float16": Mutation((tirx.BufferStore,), _stored(_to_float16)),
    "rounded to bfloat16": Mutation((tirx.BufferStore,), _stored(_to_bfloat16)),
    "inverted condition": Mutation(_CHOICES, _otherwise),
    "ignored condition": Mutation((tirx.Select, ir.Call), _unconditionally),
    **FACTORS,
}
"""Mutations by name; a term stands for a bias, a loop for a tile's edge or a sum, a condition for a mask."""
