"""What schedules ask of a GPU: capabilities that TVM's target names among its keys, whatever its kind is."""

from __future__ import annotations

from typing import Any

TENSOR_CORES = "tensor_cores"
"""Warps multiply fragments of float16 or bfloat16 with sums in float32, by CUDA's instructions."""

VECTORS_OF_FOUR = "vectors_of_four"
"""A vector has four elements at most."""


def has(target: Any, capability: str) -> bool:
    """Whether TVM's target has a capability; without a target there is none."""
    return target is not None and capability in map(str, target.keys)
