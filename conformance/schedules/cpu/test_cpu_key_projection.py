"""Attention to keys that are a linear layer of something narrower: the kernel computes them while it packs a block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from torch.nn import functional
from tvm import relax, tirx

from conformance.schedules.cpu.test_cpu_targets import assert_in_registers
from conformance.schedules.cpu.test_cpu_threads import hold_module as hold_on_threads
from conformance.support.assembly import assembly, product_loops
from conformance.support.attention import kernels
from conformance.support.cpus import target_for
from conformance.support.kernels import call_of, functions_of, hold, hold_result, lowered, lowered_for, machine_of
from conformance.support.operators import normal
from harness.compiler.targets import HOST

op = relax.op
TOKENS = 36
"""Tokens of a memory, whose keys are rotated by a table of as many positions."""


def emitted(value: relax.Expr) -> relax.Expr:
    return relax.BlockBuilder.current().emit(value)


def rotated(x: relax.Expr, memories: relax.Expr, cos: relax.Expr, sin: relax.Expr) -> relax.Expr:
    """Pairs of neighbours of [batch, 1, memories · TOKENS, channels], as PyTorch's importer writes it."""
    batch, _, length, channels = x.ty.shape
    pairs = emitted(op.reshape(x, [batch, 1, memories, TOKENS, channels // 2, 2]))
    re, im = (emitted(op.take(pairs, relax.const(n, "int64"), axis=5)) for n in range(2))
    first = op.subtract(op.multiply(re, cos), op.multiply(im, sin))
    second = op.add(op.multiply(re, sin), op.multiply(im, cos))
    both = op.concat([op.expand_dims(emitted(first), [5]), op.expand_dims(emitted(second), [5])], -1)
    return emitted(op.reshape(emitted(both), [batch, 1, length, channels]))


def to_memories(batch: int, m: relax.Expr, t: relax.Expr) -> Callable[..., relax.Expr]:
    """Queries of one head attend to memories [m, batch, narrow, TOKENS] and pointers [t, batch, narrow]."""

    def operator(q: relax.Expr, memories: relax.Expr, pointers: relax.Expr, *parameters: relax.Expr) -> relax.Expr:
        cos, sin, w, b, v = parameters
        narrow, channels, keys = int(pointers.ty.shape[2]), int(w.ty.shape[0]), m * TOKENS + t
        spatial = op.reshape(emitted(op.permute_dims(memories, [0, 3, 1, 2])), [m * TOKENS, batch, narrow])
        tokens = emitted(op.permute_dims(emitted(op.concat([emitted(spatial), pointers], 0)), [1, 0, 2]))
        projected = emitted(op.add(emitted(op.matmul(tokens, op.permute_dims(w))), b))
        projected = emitted(op.reshape(projected, [batch, 1, keys, channels]))
        turned = emitted(op.strided_slice(projected, [2], [0], [m * TOKENS], assume_inbound=True))
        kept = emitted(op.strided_slice(projected, [2], [m * TOKENS], [keys], assume_inbound=True))
        key = emitted(op.concat([rotated(turned, m, cos, sin), kept], 2))
        values = emitted(op.reshape(emitted(op.matmul(tokens, op.permute_dims(v))), [batch, keys, 1, channels]))
        return op.nn.attention(q, op.permute_dims(key, [0, 2, 1, 3]), values)

    return operator


def expected(
    q: torch.Tensor, memories: torch.Tensor, pointers: torch.Tensor, *parameters: torch.Tensor
) -> torch.Tensor:
    cos, sin, w, b, v = parameters
    tokens = torch.cat([memories.permute(0, 3, 1, 2).flatten(0, 1), pointers]).transpose(0, 1)
    keys = functional.linear(tokens, w, b)
    count = len(memories) * TOKENS
    re, im = keys[:, :count].unflatten(1, (-1, TOKENS)).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([re * cos - im * sin, re * sin + im * cos], -1).flatten(-2).flatten(1, 2)
    keys = torch.cat([turned, keys[:, count:]], 1)
    attended = functional.scaled_dot_product_attention(*(x[:, None] for x in (q[:, :, 0], keys, tokens @ v.T)))
    return attended.transpose(1, 2)


def weights(narrow: int, channels: int) -> list[np.ndarray]:
    angles = np.random.default_rng(5).uniform(0, 6, (TOKENS, channels // 2))
    tables = [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]
    return [
        *tables,
        normal((channels, narrow), 6, scale=narrow**-0.5),
        normal((channels,), 7),
        normal((channels, narrow), 8, scale=narrow**-0.5),
    ]


def inputs(batch: int, queries: int, m: int, t: int, narrow: int, channels: int) -> list[np.ndarray]:
    return [
        normal((batch, queries, 1, channels), 0),
        normal((m, batch, narrow, TOKENS), 1),
        normal((t, batch, narrow), 2),
    ]


def for_any_bank(
    batch: int, queries: int, narrow: int, channels: int, target: tvm.target.Target | None = None
) -> tvm.IRModule:
    m, t = tirx.Var("m", "int64"), tirx.Var("t", "int64")
    shapes = [
        *((batch, queries, 1, channels), (m, batch, narrow, TOKENS), (t, batch, narrow)),
        *(array.shape for array in weights(narrow, channels)),
    ]
    return lowered_for(to_memories(batch, m, t), shapes, target, inputs=3)


def computes_keys(module: tvm.IRModule) -> bool:
    (info,) = kernels(module)
    return info.decisions.get("keys") == "projected while they are packed"


# --- any number of memories and pointers ---


@pytest.mark.parametrize(
    ("batch", "queries", "narrow", "channels"),
    [(1, 30, 64, 256), (2, 97, 20, 70), pytest.param(1, 1, 5, 24, marks=pytest.mark.smoke)],
)
def test_one_kernel_for_any_bank(batch: int, queries: int, narrow: int, channels: int) -> None:
    """Nothing as long as the keys is written to memory: there are the kernel, the packing of weights, and a product."""
    module = for_any_bank(batch, queries, narrow, channels)
    assert computes_keys(module)
    assert kernels(module)[0].decisions["values"] == "projected afterwards"
    assert {name.rstrip("0123456789") for name in functions_of(module)} == {"attention", "matmul", "pack"}
    parameters = weights(narrow, channels)
    call = call_of(machine_of(module), parameters)
    for m, t in ((1, 1), (3, 80), (16, 1), (25, 37)):
        arrays = inputs(batch, queries, m, t, narrow, channels)
        hold_result(call(*arrays), expected, [*arrays, *parameters])


def test_what_lies_behind_the_last_memory_changes_nothing() -> None:
    """Neither in the tensors, where NaN follows, nor in the workspace, where those of a longer call lay."""
    machine = machine_of(for_any_bank(1, 30, 16, 32))
    loaded = list(machine["main_transform_params"]([tvm.runtime.tensor(array) for array in weights(16, 32)]))

    def call(*tensors: tvm.runtime.Tensor) -> np.ndarray:
        return machine["main"](*tensors, *loaded).numpy()

    for m, t in ((1, 1), (7, 16), (12, 5)):
        q, *bank = inputs(1, 30, m, t, 16, 32)
        alone = call(*map(tvm.runtime.tensor, (q, *bank)))
        assert np.isfinite(alone).all()
        longer = [np.full((len(part) + 9, *part.shape[1:]), np.nan, np.float32) for part in bank]
        call(*map(tvm.runtime.tensor, (q, *longer)))
        for long, short in zip(longer, bank, strict=True):
            long[: len(short)] = short
        views = [tvm.runtime.tensor(x)._create_view(short.shape) for x, short in zip(longer, bank, strict=True)]
        np.testing.assert_array_equal(call(tvm.runtime.tensor(q), *views), alone)


def test_threads_do_not_change_a_number(tmp_path: Path) -> None:
    target = HOST.tvm_target()
    module = for_any_bank(2, 97, 16, 32, target)
    hold_on_threads(module, target, tmp_path, inputs(2, 97, 23, 7, 16, 32), weights(16, 32))


@pytest.mark.parametrize("cpu", ["x86-64-v4", "x86-64-v3"])
def test_tiles_stay_in_registers(cpu: str) -> None:
    """The product of the layer as well as those of scores and results."""
    target = target_for(cpu)
    text = assembly(for_any_bank(1, 5184, 64, 256, target), target)
    assert len(product_loops(text)) >= 3
    assert_in_registers(text, cpu, {12, 24})


# --- where it is not done ---


def attended(q: relax.Expr, x: relax.Expr, w: relax.Expr) -> relax.Expr:
    """Attention of one head to x, by keys that are a layer of x."""
    keys = emitted(op.matmul(x, op.permute_dims(w)))
    return op.nn.attention(q, emitted(op.expand_dims(keys, [2])), emitted(op.expand_dims(x, [2])))


def to_keys(q: relax.Expr, x: relax.Expr, w: relax.Expr) -> relax.Expr:
    """The same with the keys for values."""
    keys = emitted(op.expand_dims(emitted(op.matmul(x, op.permute_dims(w))), [2]))
    return op.nn.attention(q, keys, keys)


def beside_keys(q: relax.Expr, x: relax.Expr, w: relax.Expr) -> relax.Expr:
    """The same, and the first keys beside it."""
    keys = emitted(op.expand_dims(emitted(op.matmul(x, op.permute_dims(w))), [2]))
    attended = emitted(op.nn.attention(q, keys, emitted(op.expand_dims(x, [2]))))
    return op.concat([attended, emitted(op.strided_slice(keys, [1], [0], [20]))], 3)


def tensors(keys: int, narrow: int, wide: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [normal((1, 20, 1, wide), 0), normal((1, keys, narrow), 1)], [normal((wide, narrow), 2, scale=narrow**-0.5)]


@pytest.mark.parametrize("operator", [to_keys, beside_keys])
def test_not_where_something_else_reads_the_keys(operator: Callable[..., relax.Expr]) -> None:
    def reference(q: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        keys = functional.linear(x, w)
        values = keys if operator is to_keys else x
        result = functional.scaled_dot_product_attention(q[:, :, 0], keys, values)
        return (result if operator is to_keys else torch.cat([result, keys[:, :20]], -1))[:, :, None]

    hold(operator, reference, *tensors(1183, 16, 32))
    assert not computes_keys(lowered(operator, *tensors(1183, 16, 32)))


def test_not_where_some_keys_are_gathered() -> None:
    """A gather by a tensor is computed before the kernel, and would need the layer's result in memory."""

    def operator(q: relax.Expr, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        keys = emitted(op.matmul(x, op.permute_dims(w)))
        gathered = emitted(op.take(keys, relax.const(np.arange(17), "int64"), axis=1))
        key = emitted(op.expand_dims(emitted(op.concat([keys, gathered], 1)), [2]))
        values = emitted(op.expand_dims(emitted(op.concat([x, emitted(op.strided_slice(x, [1], [0], [17]))], 1)), [2]))
        return op.nn.attention(q, key, values)

    def reference(q: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        keys, values = (torch.cat([whole, whole[:, :17]], 1) for whole in (functional.linear(x, w), x))
        return functional.scaled_dot_product_attention(q[:, :, 0], keys, values)[:, :, None]

    hold(operator, reference, *tensors(1166, 16, 32))
    assert not computes_keys(lowered(operator, *tensors(1166, 16, 32)))


def test_a_number_of_keys_that_is_known() -> None:
    def reference(q: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q[:, :, 0], functional.linear(x, w), x)[:, :, None]

    hold(attended, reference, *tensors(1183, 16, 32))
    assert computes_keys(lowered(attended, *tensors(1183, 16, 32)))


def test_keys_that_are_a_part_of_a_wider_layer() -> None:
    def operator(q: relax.Expr, x: relax.Expr, w: relax.Expr) -> relax.Expr:
        whole = emitted(op.matmul(x, op.permute_dims(w)))
        keys = emitted(op.strided_slice(whole, [2], [32], [64]))
        return op.nn.attention(q, emitted(op.expand_dims(keys, [2])), emitted(op.expand_dims(x, [2])))

    def reference(q: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q[:, :, 0], functional.linear(x, w)[..., 32:], x)[:, :, None]

    (_, x), (w,) = tensors(1183, 16, 64)
    hold(operator, reference, [normal((1, 20, 1, 32), 0), x], [w])
    assert computes_keys(lowered(operator, [normal((1, 20, 1, 32), 0), x], [w]))


@pytest.mark.parametrize(("keys", "narrow"), [(1183, 32), (1183, 40), (300, 16)])
def test_not_where_it_saves_nothing(keys: int, narrow: int) -> None:
    """A layer of no fewer channels; few keys, which every task copies and would compute once more."""
    assert not computes_keys(lowered(attended, *tensors(keys, narrow, 32)))
