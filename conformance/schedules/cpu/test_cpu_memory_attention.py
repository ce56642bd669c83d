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
from harness.lowering.frontends.torch_export import export_program
from harness.lowering.rope import STRATEGIES
from harness.models.sam3.upstream import upstream
from harness.schedules.cpu import cpu_pipeline
from harness.targets import TARGETS

SIDE, MEMORIES, POINTERS = 36, 3, 8
"""Tokens of an image's side, memories of such images, and keys that are not rotated."""


class MemoryAttention(torch.nn.Module):
    """Upstream's module with tensors for arguments alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = RoPEAttention(
            embedding_dim=256,
            num_heads=1,
            downsample_rate=1,
            kv_in_dim=64,
            dropout=0.0,
            feat_sizes=(SIDE, SIDE),
            rope_k_repeat=True,
        )

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
        lowered, values = STRATEGIES["real"].import_program(export_program(module, inputs))
    lowered = cpu_pipeline(TARGETS["llvm"].tvm_target())(lowered)
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
        """Upstream's arithmetic in the type of its arguments; its own rotation is always fp32."""
        own = copy.deepcopy(module.attention).to(q.dtype)
        table = own.freqs_cis.to(torch.complex64 if q.dtype == torch.float32 else torch.complex128)

        def rotated(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * by).flatten(-2)

        keys = own.k_proj(k)
        keys = torch.cat([rotated(keys[:, :-POINTERS], table.repeat(MEMORIES, 1)), keys[:, -POINTERS:]], 1)
        parts = (rotated(own.q_proj(q), table), keys, own.v_proj(v))
        return own.out_proj(functional.scaled_dot_product_attention(*(x[:, None] for x in parts))[:, 0])

    with torch.no_grad():
        torch.testing.assert_close(reference(*inputs), module(*inputs), rtol=1e-6, atol=1e-6)
    hold_result(first(actual), reference, [tensor.numpy() for tensor in inputs])


def first(result: Any) -> np.ndarray:
    """The only result, of a function that returns it alone or in a tuple."""
    return (result if hasattr(result, "numpy") else result[0]).numpy()
