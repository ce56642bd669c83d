"""Defines the capabilities of a GPU that schedules depend on; a TVM target names them among its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm

TENSOR_CORES = "tensor_cores"
"""Warps multiply fragments of float16 or bfloat16 with sums in float32, by CUDA's instructions."""

VECTORS_OF_FOUR = "vectors_of_four"
"""A vector has at most four elements."""


def has(target: tvm.target.Target | None, capability: str) -> bool:
    """Returns whether TVM's target has a capability; False without a target."""
    return target is not None and capability in map(str, target.keys)
