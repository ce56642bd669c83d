"""Defines the strategy `real`: RoPE as explicit cos/sin arithmetic on pairs instead of complex64 multiplication.

Upstream views the head's D features as D/2 complex numbers and multiplies them by e^(i·angle) (RoFormer,
arXiv:2104.09864, in the interleaved pairing of GPT-J; axial as in arXiv:2403.13298). The strategy writes the product
out: (re + i·im)(cos + i·sin) = (re·cos − im·sin) + i·(re·sin + im·cos).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.compiler.lowering.rotation import RotateBoth, Rotation, use_rotation
from harness.compiler.lowering.strategy import Strategy

if TYPE_CHECKING:
    import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    """Rotates each pair of neighbouring features of every token by its angle.

    The arithmetic is float32, as upstream's, and float64 for float64 inputs; the result has the dtype of `x`.

    Args:
        x: Queries or keys, [..., repeat·L, D] in any floating dtype, D even; returned unchanged if L·repeat = 0.
        cos: Cosines of the angles, [L, D/2].
        sin: Sines of the angles, [L, D/2].
        repeat: Number of repetitions of the table along the tokens (keys of several memory frames).

    Returns:
        The rotated tensor, shape and dtype of `x`.

    Raises:
        ValueError: The tokens are not `repeat` times the table, or the features not twice its width.
    """
    import torch

    check_table(x, cos, repeat)
    if x.shape[-2] == 0:
        return x
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(dtype), sin.to(dtype)
    pairs = x.to(dtype).reshape(*x.shape[:-2], repeat, cos.shape[0], cos.shape[1], 2)
    re, im = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1)
    return rotated.reshape(x.shape).to(x.dtype)


def check_table(x: torch.Tensor, table: torch.Tensor, repeat: int) -> None:
    """Raises ValueError unless `x` has no tokens, or `repeat` times the table's tokens and twice its features."""
    tokens, features = x.shape[-2:]
    if tokens and (tokens != repeat * table.shape[0] or features != 2 * table.shape[1]):
        raise ValueError(
            f"RoPE table of {table.shape[0]} positions x {table.shape[1]} pairs, repeated {repeat} times, "
            f"does not fit {tokens} tokens of {features} features"
        )


def axial_tables(
    head_size: int,
    width: int,
    height: int,
    theta: float = 10000.0,
    scale: float = 1.0,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes cosines and sines of two-dimensional axial RoPE, without complex numbers.

    Pair j of the first half of a head turns by x·theta^(−4j/D), pair j of the second half by y·theta^(−4j/D), where
    token t stands at x = (t mod width)·scale + offset, y = (t div width)·scale + offset.

    Args:
        head_size: D, divisible by 4.
        width: Positions along x.
        height: Positions along y.
        theta: Base of the frequencies.
        scale: Factor on the positions (24/72 in the ViT's global blocks).
        offset: Added to the scaled positions.
        dtype: Dtype of computation and result; float32 by default, as upstream.

    Returns:
        Cosines and sines, each [width·height, D/2].
    """
    import torch

    dtype = dtype or torch.float32
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 4, dtype=dtype) / head_size))
    token = torch.arange(width * height)
    x = (token % width).to(dtype) * scale + offset
    y = (token // width).to(dtype) * scale + offset
    angles = torch.cat((torch.outer(x, frequencies), torch.outer(y, frequencies)), dim=-1)
    return angles.cos(), angles.sin()


def real_tables(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a complex table e^(i·angle) [L, D/2] into contiguous cosines and sines, each [L, D/2]."""
    return table.real.clone(), table.imag.clone()


def real_rotation(rotate_both: RotateBoth | None = None) -> Rotation:
    """Returns the rotation by the buffers `rope_cos` and `rope_sin`; `rotate_both` rotates queries and keys at once."""
    return Rotation(("rope_cos", "rope_sin"), real_tables, axial_tables, rotate, rotate_both)


REAL = Strategy(
    name="real",
    summary="explicit cos/sin arithmetic on pairs of features, in float32",
    apply=lambda module: use_rotation(module, real_rotation()),
    symbolic=True,
)
