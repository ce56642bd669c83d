"""Products of fp32 numbers on units that multiply bfloat16 alone: three parts of each, six products of parts.

An fp32 number has 24 bits, a bfloat16 has 8: x = x₁ + x₂ + x₃, where each part is what is left of x, rounded to the
nearest bfloat16. This is exact unless a part is denormal, which units take for zero. Of the nine products of parts the
six that matter are multiplied and added in fp32:

    x·y ≈ x₁y₁ + x₁y₂ + x₂y₁ + x₂y₂ + x₁y₃ + x₃y₁

A part is at most 2⁻⁹ of the one before it, so that those left out, x₂y₃, x₃y₂ and x₃y₃, are at most some 2⁻²⁶ of x·y,
less than the rounding of one fp32 product (2⁻²⁴). XLA calls this `BF16_BF16_F32_X6`, oneMKL `FLOAT_TO_BF16X3`; Henry,
Tang and Heinecke (2019) describe it.

A number that is not finite, or beyond bfloat16's largest (3.39e38), makes the sums of its row or column NaN. Numbers
below 2⁻¹⁰² may lose bits.

It pays where a unit does more than six times the work of fp32's vectors: that is AMX (`amx.py`), where the host lets it
run. Elements of the depth are pairs of terms, as `bf16.py` has them, and are stored part by part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tvm import tirx

from harness.schedules.cpu.bf16 import PAIR, bits_of_pair, rounded_bits
from harness.schedules.cpu.emit import Arithmetic, Split

PARTS = 3
"""Parts of a number."""
SMALL = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0))
"""Parts of the left and of the right operand whose products are small, in an order in which each keeps one of those
before. A chunk of the depth sums them first, so that what they add is rounded while the sum is small."""
LARGE = ((0, 0),)
"""Those whose product comes afterwards."""


def pairs_of_fp32(vectors: Arithmetic) -> Arithmetic:
    """Returns the arithmetic of fp32 numbers in pairs, whose panels a unit is to multiply, from that of bfloat16."""
    return replace(vectors, name="bf16x6", multiplies="float32", joined=_terms)


def parts_of_pairs() -> Split:
    """Returns how a pair of fp32 numbers becomes pairs of bfloat16."""
    return Split("int32", PARTS, _parts, _bits, _numbers)


def _terms(read: Callable[[Any], Any], k: Any, depth: int) -> Any:
    return read(k), read(k + depth)


def _parts(terms: Any) -> list[Any]:
    found = []
    for _ in range(PARTS):
        bits = [rounded_bits(term) for term in terms]
        found.append(tirx.reinterpret("int32", bits_of_pair(*bits)))
        terms = [term - tirx.reinterpret("float32", part) for term, part in zip(terms, bits, strict=True)]
    return found


def _bits(terms: Any) -> list[Any]:
    return [tirx.reinterpret("int32", term) for term in terms]


def _numbers(bits: Callable[[int], Any]) -> list[Any]:
    return [tirx.reinterpret("float32", bits(n)) for n in range(PAIR)]
