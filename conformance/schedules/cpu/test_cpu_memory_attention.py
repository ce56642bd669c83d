"""Upstream's attention to memories, imported as it is: one head of 256 channels, keys repeated, some not rotated."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import tvm
from sam3.sam.transformer import RoPEAttention
from torch.nn import functional

from conformance.support.attention import kernels
from conformance.support.kernels import functions_of, hold_result, machine_of
from conformance.support.place import cpu_target
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.route import Route
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.core.program import Axis
from harness.models.sam3.upstream import upstream

SIDE, MEMORIES, POINTERS = 36, 3, 8
"""Tokens of an image's side, memories of such images, and keys that are not rotated."""


def upstreams() -> RoPEAttention:
    torch.manual_seed(0)
    return RoPEAttention(
        embedding_dim=256,
        num_heads=1,
        downsample_rate=1,
        kv_in_dim=64,
        dropout=0.0,
        feat_sizes=(SIDE, SIDE),
        rope_k_repeat=True,
    )


class MemoryAttention(torch.nn.Module):
    """Upstream's module with tensors for arguments alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = upstreams()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, k, v, num_k_exclude_rope=POINTERS)


def test_upstreams_memory_attention() -> None:
    """Two objects; keys come a block at a time, and values of 64 channels are projected afterwards."""
    with upstream():
        module = MemoryAttention().eval()
    tokens = SIDE * SIDE
    lengths = ((tokens, 256), (MEMORIES * tokens + POINTERS, 64), (MEMORIES * tokens + POINTERS, 64))
    inputs = tuple(torch.randn(2, *shape, generator=torch.Generator().manual_seed(1)) for shape in lengths)
    with upstream(), STRATEGIES["real"].apply(module):
        lowered, values = TORCH.import_exported(export_program(module, inputs), STRATEGIES["real"])
    lowered = cpu_pipeline(cpu_target())(lowered)
    (info,) = kernels(lowered)
    assert info.decisions["packed"] == "by block" and info.decisions["values"] == "projected afterwards"
    assert info.extents["width"] == 64
    names = {name.rstrip("0123456789") for name in functions_of(lowered)}
    # Rotation, repetition and joining are done while keys are packed.
    assert names == {"attention", "matmul_add", "pack"}, (
        "rotation, repetition and joining are done while keys are packed"
    )
    machine = machine_of(lowered)
    weights = machine["main_transform_params"]([tvm.runtime.tensor(np.asarray(value)) for value in values.values()])
    actual = machine["main"](*(tvm.runtime.tensor(tensor.numpy()) for tensor in inputs), *weights)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attended(module.attention, q, k, v, MEMORIES)

    with torch.no_grad():
        torch.testing.assert_close(reference(*inputs), module(*inputs), rtol=1e-6, atol=1e-6)
    hold_result(first(actual), reference, [tensor.numpy() for tensor in inputs])


def attended(
    attention: RoPEAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, memories: int
) -> torch.Tensor:
    """Upstream's arithmetic in the type of its arguments; its own rotation is always fp32."""
    own = copy.deepcopy(attention).to(q.dtype)
    table = own.freqs_cis.to(torch.complex64 if q.dtype == torch.float32 else torch.complex128)

    def rotated(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * by).flatten(-2)

    keys, count = own.k_proj(k), memories * len(table)
    keys = torch.cat([rotated(keys[:, :count], table.repeat(memories, 1)), keys[:, count:]], 1)
    parts = (rotated(own.q_proj(q), table), keys, own.v_proj(v))
    return own.out_proj(functional.scaled_dot_product_attention(*(x[:, None] for x in parts))[:, 0])


class AnyBank(torch.nn.Module):
    """Upstream's module, and what its tracker does before it: memories and pointers are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = upstreams()

    def forward(self, q: torch.Tensor, memories: torch.Tensor, pointers: torch.Tensor) -> torch.Tensor:
        """[B, SIDE², 256], [M, B, 64, SIDE, SIDE] and [P, B, 64] to [B, SIDE², 256]."""
        values, keys = together(memories, pointers)
        return self.attention(q, keys, values, num_k_exclude_rope=pointers.shape[0])


def together(memories: torch.Tensor, pointers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and keys [B, M · SIDE² + P, 64]; where a token stands is added to keys alone."""
    spatial = memories.flatten(3).permute(0, 3, 1, 2).flatten(0, 1)
    values = torch.cat([spatial, pointers]).transpose(0, 1)
    return values, values + torch.cat([spatial * 0.5, pointers * 2.0]).transpose(0, 1)


def test_one_program_for_every_bank() -> None:
    """Two objects; everything that has as many rows as there are keys is done while keys are packed."""
    with upstream():
        module = AnyBank().eval()
    axes = ({}, {0: Axis("memories", 1, 16)}, {0: Axis("pointers", 1, 80)})
    route = Route()
    with upstream():
        program = route.lower(route.export(module, bank(2, 4), axes), module)
    lowered = cpu_pipeline(cpu_target())(program.module)
    assert {name.rstrip("0123456789") for name in functions_of(lowered)} == {"attention", "matmul_add", "pack"}
    machine = machine_of(lowered)
    weights = machine["main_transform_params"]([tvm.runtime.tensor(x) for x in program.parameters().values()])

    def reference(q: torch.Tensor, memories: torch.Tensor, pointers: torch.Tensor) -> torch.Tensor:
        values, keys = together(memories, pointers)
        return attended(module.attention, q, keys, values, len(memories))

    for memories, pointers in ((1, 1), (3, 8), (4, 77)):
        inputs = bank(memories, pointers)
        actual = machine["main"](*(tvm.runtime.tensor(tensor.numpy()) for tensor in inputs), *weights)
        hold_result(first(actual), reference, [tensor.numpy() for tensor in inputs])


def bank(memories: int, pointers: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, SIDE * SIDE, 256), (memories, 2, 64, SIDE, SIDE), (pointers, 2, 64))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def first(result: Any) -> np.ndarray:
    """The only result, of a function that returns it alone or in a tuple."""
    return (result if hasattr(result, "numpy") else result[0]).numpy()
