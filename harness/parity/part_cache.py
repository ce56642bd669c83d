"""Caches the outputs of a module part that several references contain, on disk.

At full scale the vision transformer takes four fifths of the time of every reference and oracle that begins with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.core.program import Array
from harness.parity.arrays import arrays_digest
from harness.parity.cache import ArrayCache


@contextmanager
def cache_part(part: nn.Module, cache: ArrayCache, key: Mapping[str, Any]) -> Iterator[None]:
    """Makes `part` return cached outputs for known inputs within the context.

    The n-th call with the same input is a separate entry, so that a module that runs twice to check repeatability
    really runs twice. Copies of the part, as the oracle makes them, use the cache too; float64 inputs are different
    inputs.

    Args:
        part: Module that takes one tensor and returns a list of tensors.
        cache: Cache of the outputs.
        key: Everything that the outputs depend on besides the input.
    """
    calls: Counter[str] = Counter()
    original: Any = type(part)

    class Cached(original):  # type: ignore[misc]
        def forward(self, image: Tensor) -> list[Tensor]:
            digest = arrays_digest({"input": image.detach().numpy()})
            calls[digest] += 1
            entry = {**key, "input": digest, "call": calls[digest]}
            return _to_tensors(cache.get_or_make(entry, lambda: _to_arrays(original.forward(self, image))))

    part.__class__ = Cached
    try:
        yield
    finally:
        part.__class__ = original


def _to_arrays(outputs: Sequence[Tensor]) -> dict[str, Array]:
    """Returns outputs with their memory layout, by which later operators may choose their algorithm."""
    arrays: dict[str, Array] = {}
    for number, tensor in enumerate(outputs):
        order = np.argsort(np.negative(tensor.stride()), kind="stable").tolist()
        arrays[f"output {number}"] = tensor.detach().permute(order).contiguous().numpy()
        arrays[f"order {number}"] = np.array(order)
    return arrays


def _to_tensors(arrays: Mapping[str, Array]) -> list[Tensor]:
    outputs = []
    for number in range(len(arrays) // 2):
        order = arrays[f"order {number}"]
        outputs.append(torch.from_numpy(arrays[f"output {number}"]).permute(np.argsort(order).tolist()))
    return outputs
