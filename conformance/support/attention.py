"""Builds attention on Relax and in PyTorch, with operands, for the tests of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import tvm
from torch.nn import functional
from tvm import relax

from conformance.support.operators import normal
from harness.compiler.schedules.common.kernel_info import KernelInfo, infos_of
from harness.compiler.schedules.cpu.bf16 import allow_bf16


def attention(causal: str | None = None, scale: float | None = None) -> Callable[..., relax.Expr]:
    """Returns the operator of [batch, length, head, channel] and a bias, if there is one."""
    return lambda q, k, v, bias=None: relax.op.nn.attention(q, k, v, bias, scale, causal)


def attention_bf16(causal: str | None = None) -> Callable[..., relax.Expr]:
    """Returns the same operator with operands that `harness.compiler.lowering.precision` rounds to bfloat16."""
    return lambda *operands: allow_bf16(attention(causal)(*operands))


def reference(causal: bool = False, scale: float | None = None) -> Callable[..., torch.Tensor]:
    """Computes PyTorch's attention on [batch, length, head, channel] in its plain form, which is the same in fp64."""

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        return functional.scaled_dot_product_attention(*heads, bias, is_causal=causal, scale=scale).transpose(1, 2)

    return compute


def operands(
    batch: int, queries: int, keys: int, heads: int, channels: int, width: int | None = None, scale: float = 1.0
) -> list[np.ndarray]:
    """Draws seeded queries, keys and values."""
    return [
        normal((batch, queries, heads, channels), 0, scale=scale),
        normal((batch, keys, heads, channels), 1),
        normal((batch, keys, heads, width or channels), 2),
    ]


def kernels(module: tvm.IRModule) -> list[KernelInfo]:
    """Returns the facts of the attention kernels of a lowered module."""
    return [info for info in infos_of(module).values() if info.operator == "nn.attention"]


def mask_of(queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bias that masks keys right of the diagonal that ends in the last corner."""
    seen = torch.ones(queries, keys).tril(keys - queries).bool()
    return torch.zeros(queries, keys, dtype=dtype).masked_fill(~seen, -torch.inf)


def hold_beyond_the_last_key(machine: relax.VirtualMachine, counts: Sequence[int]) -> None:
    """Holds 30 queries of 72 channels to the same numbers whatever lies behind their keys, for these numbers of keys.

    NaN follows in the tensors, and lies in the workspace of the call before, which had more keys.
    """
    for count in counts:
        q, k, v = operands(1, 30, count, 1, 72)
        alone = machine["main"](*map(tvm.runtime.tensor, (q, k, v))).numpy()
        assert np.isfinite(alone).all()
        poison = [np.full((1, count + 700, 1, 72), np.nan, np.float32) for _ in range(2)]
        machine["main"](*map(tvm.runtime.tensor, (q, *poison)))
        for long, short in zip(poison, (k, v), strict=True):
            long[:, :count] = short
        beginnings = [
            tvm.runtime.tensor(long)._create_view(short.shape) for long, short in zip(poison, (k, v), strict=True)
        ]
        np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(q), *beginnings).numpy(), alone)


def hold_padding(call: Callable[..., np.ndarray]) -> None:
    """Holds 30 queries of two heads of 64 channels to the same bits whether keys are masked or are not there."""
    arrays = operands(1, 30, 1300, 2, 64)
    for count in (5, 601, 1200):
        mask = np.zeros((1, 1, 1, 1300), np.float32)
        mask[..., count:] = -np.inf
        cut = (arrays[0], *(x[:, :count] for x in arrays[1:]), mask[..., :count])
        np.testing.assert_array_equal(call(*arrays, mask), call(*cut))
