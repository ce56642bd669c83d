"""Tests the laws of every rotation: upstream's complex RoPE, and the properties of RoPE.

Bounds are rounding bounds. Upstream computes in float32, eps = 2⁻²³, and casts back; `length` is that of the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from hypothesis import strategies as st

EPS = torch.finfo(torch.float32).eps
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Setting:
    """One draw of everything that axial RoPE depends on."""

    head_size: int
    width: int
    height: int
    theta: float
    scale: float
    offset: int
    batch: int
    heads: int
    dtype: torch.dtype
    exponent: int
    contiguous: bool
    seed: int

    @property
    def grid(self) -> dict:
        return {"dim": self.head_size, "end_x": self.width, "end_y": self.height, "theta": self.theta}

    @property
    def axial(self) -> dict:
        return {**self.grid, "scale_pos": self.scale, "offset": self.offset}

    def tokens(self, salt: int, repeat: int = 1) -> torch.Tensor:
        """Queries or keys, [batch, heads, repeat·tokens, head_size]; float32 or float64 values that the dtype holds."""
        generator = torch.Generator().manual_seed(2 * self.seed + salt)
        shape = (self.batch, self.heads, repeat * self.width * self.height, self.head_size)
        # half precision holds no 1e30
        size = 10.0 ** (self.exponent / 10 if self.dtype in HALVES else self.exponent)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * size
        return values.to(self.dtype).to(self.outside)

    @property
    def outside(self) -> torch.dtype:
        """NumPy has no bfloat16: half precision goes in and out as float32, and is cast inside the program."""
        return torch.float32 if self.dtype in HALVES else self.dtype


def any_setting(*dtypes: torch.dtype) -> st.SearchStrategy[Setting]:
    """Draws settings in one of these dtypes, or in any."""
    return st.builds(
        Setting,
        head_size=st.integers(1, 16).map(lambda quarter: 4 * quarter),
        width=st.integers(1, 7),
        height=st.integers(1, 7),
        theta=st.sampled_from((2.0, 100.0, 10000.0, 500000.0)),
        scale=st.sampled_from((24 / 72, 0.5, 1.0, 2.0)),
        offset=st.integers(-3, 100),
        batch=st.integers(1, 2),
        heads=st.integers(1, 3),
        dtype=st.sampled_from(dtypes or (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32)),
        exponent=st.integers(-30, 30),
        contiguous=st.booleans(),
        seed=st.integers(0, 2**20),
    )


def upstream_table(sam3: SimpleNamespace, setting: Setting) -> torch.Tensor:
    """Computes e^(i·angle), complex64, [tokens, head_size / 2]."""
    table: torch.Tensor = sam3.trunk.compute_axial_cis(**setting.axial)
    return table


class Rotations(torch.nn.Module):
    """One attention module for each table, and what the laws compare: see `check`."""

    def __init__(self, sam3: SimpleNamespace, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

        def rotation(scale: float, offset: float) -> torch.nn.Module:
            attention = sam3.trunk.Attention(setting.head_size, 1, use_rope=True, input_size=(1, 1))
            attention.freqs_cis = sam3.trunk.compute_axial_cis(**setting.grid, scale_pos=scale, offset=offset)
            return attention

        self.once = rotation(setting.scale, setting.offset)
        self.again = rotation(1.0, 0)
        self.both = rotation(setting.scale + 1.0, setting.offset)
        self.zero = rotation(0.0, 0)
        self.moved = rotation(setting.scale, setting.offset + 5)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.setting.contiguous:  # as the model has them: heads after tokens
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        q, k = q.to(self.setting.dtype), k.to(self.setting.dtype)
        once = self.once._apply_rope(q, k)
        twice, _ = self.again._apply_rope(*once)
        both, _ = self.both._apply_rope(q, k)
        zero, _ = self.zero._apply_rope(q, k)
        moved = self.moved._apply_rope(q, k)
        return tuple(x.to(self.setting.outside) for x in (*once, twice, both, zero, *moved))


def pairs(x: torch.Tensor) -> torch.Tensor:
    return x.double().unflatten(-1, (-1, 2))


def lengths(x: torch.Tensor) -> torch.Tensor:
    """Computes |z| of the pair of each feature, float64, shape of `x`."""
    return pairs(x).norm(dim=-1, keepdim=True).expand_as(pairs(x)).flatten(-2)


def ulp(x: torch.Tensor) -> torch.Tensor:
    """Returns the distance of float32 numbers at |x|, for float64 values."""
    exponent = torch.frexp(x.abs()).exponent.clamp(min=-125)
    return torch.ldexp(torch.ones_like(x), exponent - 24)


def check(sam3: SimpleNamespace, setting: Setting, outputs: Sequence[torch.Tensor]) -> None:
    """Holds what `Rotations` returned for tokens of salts 0 and 1 to upstream's values, and to the laws."""
    q, k = setting.tokens(0), setting.tokens(1)
    table = upstream_table(sam3, setting)
    q_once, k_once, twice, both, zero, *moved = outputs
    # storing a result in half precision rounds it, and may make it subnormal
    kept = torch.finfo(setting.dtype)
    step, least = (kept.eps, kept.smallest_normal * kept.eps) if setting.dtype in HALVES else (0.0, 2.0**-149)

    def close(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
        assert actual.shape == expected.shape
        error, bound = (actual.double() - expected.double()).abs(), bound + 2 * least
        assert bool((error <= bound).all()), f"{what}: {(error / bound).max().item():.3g} times the bound"

    for x, actual in ((q, q_once), (k, k_once)):
        # 2 ULP of the larger product of each part, with the tables as they are
        (re, im), (cos, sin) = pairs(rounded_like(x, actual)).unbind(-1), (table.real.double(), table.imag.double())
        exact = torch.stack((re * cos - im * sin, re * sin + im * cos), -1).flatten(-2)
        larger = torch.stack(
            (torch.maximum((re * cos).abs(), (im * sin).abs()), torch.maximum((re * sin).abs(), (im * cos).abs())), -1
        ).flatten(-2)
        close(actual, exact, 2 * ulp(larger) + step * exact.abs() + 2 * EPS**2 * larger, "2 ULP")
        close(lengths(actual), lengths(x), (3 * EPS + 2 * step) * lengths(x), "norm")

    inside = tuple(x.to(setting.dtype) for x in (q, k))
    for upstreams in (
        sam3.trunk.apply_rotary_enc(*inside, table),
        sam3.tracker_rope.apply_rotary_enc(*inside, table),
        sam3.tracker_rope.apply_rotary_enc_real(*inside, table.real, table.imag),
    ):
        for x, actual, expected in zip((q, k), (q_once, k_once), upstreams, strict=True):
            close(actual, expected, (3 * EPS + step) * lengths(x), "upstream")

    assert torch.equal(zero, rounded_like(q, zero)), "rotation by zero"
    # every angle is rounded three times, every rotation moves the pair by no more than 3 eps
    furthest = (setting.scale + 1) * max(setting.width, setting.height) + abs(setting.offset) + 5
    rounding = 3 * furthest * EPS + 9 * EPS + 3 * step
    close(twice, both, rounding * lengths(q), "composition")
    here, there = (a.double() @ b.double().mT for a, b in ((q_once, k_once), tuple(moved)))
    sizes = q.double().norm(dim=-1)[..., :, None] * k.double().norm(dim=-1)[..., None, :]
    close(here, there, 2 * rounding * sizes, "relative positions")


def rounded_like(x: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Returns the input that was rotated: upstream rounds float64 to float32 first, the strategy `real` does not."""
    return x.to(torch.float32).to(x.dtype) if torch.equal(actual, actual.float().to(actual.dtype)) else x
