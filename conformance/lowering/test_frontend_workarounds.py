"""The workarounds that SAM 3's own operators do not exercise, on many shapes, against PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st

from conformance.support.examples import examples
from harness.compiler.lowering.frontends.running import run_torch
from harness.compiler.lowering.frontends.torch_export.running import run_tvm

sizes = st.integers(1, 9)
seeds = st.integers(0, 2**31)
few = examples(12, phases=(Phase.generate,))


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)


def holds(function: Callable[..., object], *args: torch.Tensor) -> None:
    module = Function(function)
    actual, expected = run_tvm(module, args), run_torch(module, args)
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def indices(seed: int, size: int, *shape: int) -> torch.Tensor:
    return torch.randint(-size, size, shape, generator=torch.Generator().manual_seed(seed))


@few
@given(sizes, sizes, sizes, st.integers(1, 12), st.integers(1, 12), st.booleans(), seeds)
def test_antialias(channels: int, height: int, width: int, rows: int, columns: int, align: bool, seed: int) -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(
            x, size=(rows, columns), mode="bilinear", antialias=True, align_corners=align
        )

    holds(resize, normal(seed, 1, channels, 3 * height, 3 * width))


@few
@given(st.lists(sizes, min_size=3, max_size=4), st.sampled_from(("i", "i:", ":i", "ij", ":ij", "i:j", "kj")), seeds)
def test_index(shape: list[int], pattern: str, seed: int) -> None:
    def take(x: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        given_indices = iter(index)
        return x[tuple(slice(None) if letter == ":" else next(given_indices) for letter in pattern)]

    axes = [axis for axis, letter in enumerate(pattern) if letter != ":"]
    rows = {"i": (4,), "j": (4,), "k": (3, 1)}
    holds(take, normal(seed, *shape), *(indices(seed + a, shape[a], *rows[pattern[a]]) for a in axes))


@few
@given(st.lists(sizes, min_size=1, max_size=3), st.integers(1, 2), st.booleans(), st.booleans(), seeds)
def test_index_put(shape: list[int], count: int, accumulate: bool, whole: bool, seed: int) -> None:
    count = min(count, len(shape))
    # an index that comes twice only has a defined result where values are added
    number = 4 if accumulate else 1

    def put(x: torch.Tensor, value: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        return x.index_put(index, value, accumulate)

    value = normal(seed, number, *shape[count:]) if whole else normal(seed)
    holds(put, normal(seed, *shape), value, *(indices(seed + a, shape[a], number) for a in range(count)))


@few
@given(st.lists(sizes, min_size=1, max_size=3), st.sampled_from(("add", "sum", "prod", "amax", "amin")), seeds)
def test_scatter(shape: list[int], reduction: str, seed: int) -> None:
    dim = seed % len(shape) - seed % 2 * len(shape)
    # fewer indices than values, along the axes, and any number along the one that is scattered over
    counts = [max(1, size - seed % 3) for size in shape]
    index = indices(seed, shape[dim], *counts) % shape[dim]

    def scatter(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (
            x.scatter_add(dim, index, values) if reduction == "add" else x.scatter_reduce(dim, index, values, reduction)
        )

    holds(scatter, normal(seed, *shape), index, normal(seed + 1, *shape))


@few
@given(st.lists(sizes, min_size=1, max_size=3), seeds)
def test_booleans_are_added_and_multiplied(shape: list[int], seed: int) -> None:
    x, y = (normal(seed + n, *shape) > 0 for n in range(2))
    holds(lambda x, y: (x + y, x * y, (x + y) * x + y), x, y)


@few
@given(st.lists(sizes, min_size=1, max_size=3), st.booleans(), st.booleans(), seeds)
def test_reductions(shape: list[int], keepdim: bool, is_integer: bool, seed: int) -> None:
    dim = seed % len(shape)
    x = normal(seed, *shape).clamp(min=-0.3)
    x = (x * 2).long() if is_integer else x
    holds(lambda x: (x.prod(dim, keepdim), x.any(dim, keepdim), x.any(), x.all(dim), x.all(), (x > 0).cumsum(dim)), x)


@few
@given(st.lists(sizes, min_size=1, max_size=3), st.booleans(), seeds)
def test_stable_sort(shape: list[int], descending: bool, seed: int) -> None:
    x = indices(seed, 3, *shape)
    holds(lambda x: torch.sort(x, dim=seed % len(shape), descending=descending, stable=True), x)


@few
@given(st.sampled_from((torch.bool, torch.int64, torch.float32)), st.sampled_from((2, 3, -1, 0.5, 2.5)), seeds)
def test_numbers_promote_tensors(dtype: torch.dtype, number: float, seed: int) -> None:
    x = indices(seed, 4, 5).to(dtype)

    def arithmetic(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = (x + number, x * number, x / number, x == number, x < number, x.float() - number)
        return wide if dtype is torch.bool else (*wide, x - number, number - x, torch.add(x, x, alpha=2), x.clamp(-1))

    holds(arithmetic, x)


@few
@given(st.sampled_from((2, 3, 0.1, -0.7, 0.5, -4)), st.booleans(), seeds)
def test_division(divisor: float, is_tensor: bool, seed: int) -> None:
    x = (normal(seed, 64) * 200).round() / 10

    def divide(x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, ...]:
        right = by if is_tensor else divisor
        return x // right, torch.div(x, right, rounding_mode="trunc"), torch.div(x, right, rounding_mode="floor")

    holds(divide, x, torch.full((64,), float(divisor)))


@few
@given(st.integers(0, 3), sizes, st.sampled_from((0, 1, -1)), seeds)
def test_empty_tensors(count: int, width: int, dim: int, seed: int) -> None:
    """The concatenation of SAM 3's prompts: none or some of each, padded, transposed, counted."""

    def concatenate(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([x.permute(1, 0, 2), y.permute(1, 0, 2)], dim=1)
        lengths = (~mask).sum(dim=-1)
        places = torch.arange(x.shape[0])[:, None].repeat(1, 2) + 0 * lengths[None]
        filled = torch.zeros(4, 2, width).scatter(0, places[:, :, None].expand(-1, -1, width), x)
        return both, lengths, filled, x.sum(0), x.flatten(1), x.cumsum(dim)

    mask = torch.rand(2, count, generator=torch.Generator().manual_seed(seed)) > 0.5
    holds(concatenate, normal(seed, count, 2, width), normal(seed, 3, 2, width), mask)


@few
@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), seeds)
def test_group_norm(groups: int, per_group: int, affine: bool, seed: int) -> None:
    channels = groups * per_group
    weights = (normal(seed, channels), normal(seed + 1, channels)) if affine else ()
    holds(lambda x, *w: torch.nn.functional.group_norm(x, groups, *w), normal(seed, 2, channels, 4, 3), *weights)


def test_fills() -> None:
    holds(
        lambda x: (torch.full((2, 3), math.inf) * x, torch.full((2, 2), -math.inf).triu(1), x.new_full((2,), 3)),
        torch.ones(2, 3),
    )


def test_specials_keep_their_places() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -2.0])
    holds(lambda x: (x.clamp(min=0.0), x.clamp(-1, 1), x != x, x.sign(), x.sigmoid(), x > 0), x)
