"""Attention that takes keys a block at a time: any number of them, known at compile time or not, in little memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, tirx

from conformance.support.attention import (
    attention,
    hold_beyond_the_last_key,
    hold_padding,
    kernels,
    mask_of,
    operands,
    reference,
)
from conformance.support.cpus import target_for
from conformance.support.examples import examples
from conformance.support.kernels import call_of, hold_result, lowered, lowered_for, machine_of
from conformance.support.operators import normal
from harness.compiler.schedules.common.kernel_info import describe

op = relax.op
MEGABYTE = 1 << 20


def length() -> tirx.Var:
    return tirx.Var("n", "int64")


def streams(module: tvm.IRModule) -> bool:
    (info,) = kernels(module)
    return info.decisions.get("packed") == "by block"


# --- a number of keys that is not known when it is compiled ---


@examples(8)
@given(
    batch=st.integers(1, 2),
    queries=st.sampled_from([1, 7, 24, 50, 97]),
    heads=st.integers(1, 2),
    extents=st.sampled_from([(16, 16), (5, 1), (64, 20), (72, 40), (256, 64), (130, 256)]),
    keys=st.lists(st.integers(1, 2500), min_size=3, max_size=3),
)
def test_one_kernel_for_any_number_of_keys(
    batch: int, queries: int, heads: int, extents: tuple[int, int], keys: list[int]
) -> None:
    n, (channels, width) = length(), extents
    shapes = [(batch, queries, heads, channels), (batch, n, heads, channels), (batch, n, heads, width)]
    module = lowered_for(attention(), shapes)
    assert streams(module)
    call = call_of(machine_of(module))
    for count in keys:
        arrays = operands(batch, queries, count, heads, channels, width)
        hold_result(call(*arrays), reference(), arrays)


@pytest.mark.parametrize("channels", [16, 256])
def test_numbers_of_keys_around_a_block_and_a_tile(channels: int) -> None:
    n = length()
    module = lowered_for(attention(), [(1, 30, 1, channels), (1, n, 1, channels), (1, n, 1, channels)])
    block = int(kernels(module)[0].decisions["keys at a time"])
    rows = kernels(module)[0].tile["score rows"]
    call = call_of(machine_of(module))
    for count in (rows - 1, rows, rows + 1, block - 1, block, block + 1, 2 * block, 2 * block + rows + 1):
        arrays = operands(1, 30, count, 1, channels)
        hold_result(call(*arrays), reference(), arrays)


@pytest.mark.parametrize("shape", ["every", "shared"])
def test_a_bias_lowered_for(shape: str) -> None:
    """Some keys are masked; one query has none and gives zero."""
    n = length()
    around = (2, 3, 30) if shape == "every" else (1, 1, 1)
    module = lowered_for(attention(), [(2, 30, 3, 32), (2, n, 3, 32), (2, n, 3, 32), (*around, n)])
    assert streams(module)
    call = call_of(machine_of(module))
    for count in (3, 601, 1400):
        bias = normal((*around, count), 3)
        bias[np.random.default_rng(0).random(bias.shape) < 0.3] = -np.inf
        if shape == "every":
            bias[:, :, 7] = -np.inf
        arrays = [*operands(2, 30, count, 3, 32), bias]
        actual = hold_result(call(*arrays), reference(), arrays)
        assert shape == "shared" or (actual[:, 7] == 0).all()


def test_causal_with_any_number_of_keys() -> None:
    n = length()
    shapes = [(2, 40, 2, 32), (2, n, 2, 32), (2, n, 2, 32)]
    first, last = (call_of(machine_of(lowered_for(attention(corner), shapes))) for corner in ("TopLeft", "BottomRight"))
    for count in (17, 40, 700):
        arrays = operands(2, 40, count, 2, 32)
        hold_result(first(*arrays), reference(causal=True), arrays)
        mask = mask_of(40, count, torch.float32)
        hold_result(last(*arrays), lambda q, k, v, mask=mask: reference()(q, k, v, mask.to(q.dtype)), arrays)


def test_moves_of_keys_of_any_length_are_followed() -> None:
    """Heads are cut out of a projection and put first, as in a model: no copy of keys or values is made."""
    n = length()

    def heads(x: relax.Expr) -> relax.Expr:
        return op.permute_dims(op.reshape(x, [2, x.ty.shape[1], 4, 16]), [0, 2, 1, 3])

    def operator(*tensors: relax.Expr) -> relax.Expr:
        result = op.nn.attention(*(op.permute_dims(heads(x), [0, 2, 1, 3]) for x in tensors))
        return op.reshape(op.permute_dims(result, [0, 1, 2, 3]), [2, 30, 64])

    def expected(*tensors: torch.Tensor) -> torch.Tensor:
        return reference()(*(x.reshape(2, -1, 4, 16) for x in tensors)).reshape(2, 30, 64)

    module = lowered_for(operator, [(2, 30, 64), (2, n, 64), (2, n, 64)])
    assert [name for name in names_of(module) if "reshape" not in name] == ["attention"]
    call = call_of(machine_of(module))
    for count in (5, 700):
        arrays = [normal((2, extent, 64), seed) for seed, extent in enumerate((30, count, count))]
        hold_result(call(*arrays), expected, arrays)


def names_of(module: tvm.IRModule) -> list[str]:
    return [variable.name_hint for variable, f in module.functions_items() if isinstance(f, tirx.PrimFunc)]


def test_keys_of_memories_and_pointers() -> None:
    """Two numbers that are not known, and a length of 36 of one and 4 of the other."""
    m, p = tirx.Var("m", "int64"), tirx.Var("p", "int64")

    def operator(q: relax.Expr, memories: relax.Expr, pointers: relax.Expr) -> relax.Expr:
        keys = op.concat([op.reshape(memories, [1, 36 * m, 1, 64]), op.reshape(pointers, [1, 4 * p, 1, 64])], 1)
        return op.nn.attention(q, keys, keys)

    def expected(q: torch.Tensor, memories: torch.Tensor, pointers: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([memories.reshape(1, -1, 1, 64), pointers.reshape(1, -1, 1, 64)], 1)
        return reference()(q, keys, keys)

    module = lowered_for(operator, [(1, 30, 1, 64), (m, 36, 64), (p, 4, 64)])
    assert streams(module)
    call = call_of(machine_of(module))
    for counts in ((1, 1), (7, 16), (10, 19)):
        arrays = [
            normal(shape, seed) for seed, shape in enumerate([(1, 30, 1, 64), (counts[0], 36, 64), (counts[1], 4, 64)])
        ]
        hold_result(call(*arrays), expected, arrays)


def test_facts_of_a_kernel_for_any_number_of_keys() -> None:
    n = length()
    (info,) = kernels(lowered_for(attention(), [(1, 30, 1, 64), (1, n, 1, 64), (1, n, 1, 64)]))
    assert info.extents["keys"] == "n" and info.flop is None and info.bytes_moved is None
    assert "30 queries, n keys, 64 channels" in describe(info)


# --- what lies behind the last key ---


def test_what_lies_behind_the_last_key_changes_nothing() -> None:
    """Neither in the tensors, where NaN follows, nor in the workspace, where the keys of a longer call lay."""
    n = length()
    machine = machine_of(lowered_for(attention(), [(1, 30, 1, 72), (1, n, 1, 72), (1, n, 1, 72)]))
    hold_beyond_the_last_key(machine, (1, 130, 601))


def test_padding_with_a_mask_changes_nothing() -> None:
    n = length()
    shapes = [(1, 30, 2, 64), (1, n, 2, 64), (1, n, 2, 64), (1, 1, 1, n)]
    hold_padding(call_of(machine_of(lowered_for(attention(), shapes))))


# --- many keys, known when it is compiled ---


def test_which_attention_streams() -> None:
    """Where no equal blocks divide the keys, and where all keys of a head are more than a task should copy."""
    assert not streams(lowered(attention(), operands(1, 200, 5184, 1, 64)))
    assert not streams(lowered(attention(), operands(1, 200, 1155, 1, 16)))
    assert streams(lowered(attention(), operands(1, 200, 1183, 1, 16)))
    assert streams(lowered(attention(), operands(1, 200, 5184, 1, 256)))


def in_new_process(script: str, threads: int) -> str:
    """What a script prints, on so many of TVM's threads; the pool obeys when it starts."""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TVM_NUM_THREADS": str(threads), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- memory ---

MANY = 5184 * 10 + 4 * 19
"""Keys of ten memories and nineteen pointers."""


@pytest.mark.parametrize("cpu", ["x86-64-v4", "x86-64-v3", "neoverse-n1"])
@pytest.mark.parametrize("width", [64, 256])
def test_workspace_of_many_keys(cpu: str, width: int) -> None:
    """16 MB with eight threads; for eight objects no more, because they are computed one after the other."""
    target = target_for(cpu)
    for objects, keys in ((1, MANY), (1, length()), (8, length())):
        shapes = [(objects, 5184, 1, 256), (objects, keys, 1, 256), (objects, keys, 1, width)]
        shared, own = workspace(lowered_for(attention(), shapes, target)["attention"])
        assert 4 * 5184 * (256 + width) < shared and shared + 8 * own <= 16 * MEGABYTE


def workspace(function: tirx.PrimFunc) -> tuple[int, int]:
    """Bytes that a kernel allocates in all, and those that each of its threads allocates at most."""

    def allocated(statement: tirx.Stmt) -> int:
        sizes: list[int] = []

        def visit(node: object) -> None:
            if isinstance(node, tirx.AllocBuffer):
                sizes.append(4 * math.prod(int(extent) for extent in node.buffer.shape))

        tvm_ffi.structural_walk(statement, visit)
        return sum(sizes)

    loops: list[tirx.For] = []

    def visit(node: object) -> None:
        if isinstance(node, tirx.For) and node.kind == tirx.ForKind.PARALLEL:
            loops.append(node)

    tvm_ffi.structural_walk(function.body, visit)
    own = [allocated(loop.body) for loop in loops]
    return allocated(function.body) - sum(own), max(own)


PEAK = """
import re
from pathlib import Path
import numpy as np, tvm
from conformance.support.attention import attention, operands
from conformance.support.kernels import lowered, machine_of
from harness.core.processes.memory import give_back_freed_memory
def status(name):
    return int(re.search(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
arrays = operands(1, 5184, 36352 // 4 + 64, 1, 256, 64)
machine = machine_of(lowered(attention(), arrays))
tensors = [tvm.runtime.tensor(array) for array in arrays]
small = machine_of(lowered(attention(), operands(1, 200, 1183, 2, 72)))
small["main"](*(tvm.runtime.tensor(array) for array in operands(1, 200, 1183, 2, 72)))
give_back_freed_memory()
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
result = machine["main"](*tensors)
print(status("VmHWM") - before - result.numpy().nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the peak of a process's memory")
def test_measured_memory_of_a_call() -> None:
    """Beside operands and result; the workspace does not depend on the number of keys."""
    peak = int(in_new_process(PEAK, 2))
    assert 4 * MEGABYTE < peak <= 16 * MEGABYTE
