"""The workarounds that SAM 3's own operators do not exercise, on many shapes, against PyTorch.

The examples of a property are one program, compiled without LLVM's passes: it is the importer that is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from conformance.support.batches import UNOPTIMIZED, Part, drawn, run_together
from conformance.support.examples import examples
from conformance.support.function_module import FunctionModule
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import repaired_pipeline, run_module, run_torch
from harness.compiler.lowering.frontends.torch_export.importing import import_program

sizes = st.integers(1, 9)
seeds = st.integers(0, 2**31)
EXAMPLES = 12
"""How many programs a property is held for."""


def compiled(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The outputs of a module that is imported with every workaround."""
    imported, parameters = import_program(export_program(module, inputs))
    arrays = [*(tensor.numpy() for tensor in inputs), *parameters.values()]
    return [*map(torch.from_numpy, run_module(imported, arrays, UNOPTIMIZED, repaired_pipeline()))]


def hold(parts: list[Part]) -> None:
    """Holds programs, all compiled as one, to PyTorch."""
    for part, outputs in zip(parts, run_together(compiled, parts), strict=True):
        for output, expected in zip(outputs, run_torch(part.module, part.inputs), strict=True):
            actual = output.numpy()
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), part.what
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=str(part.what))


def holds(function: Callable[..., object], *args: torch.Tensor) -> None:
    hold([Part("the program", FunctionModule(function), args)])


def batched(*sources: st.SearchStrategy[Any]) -> Callable[[Callable[..., tuple[Any, ...]]], Callable[[], None]]:
    """Makes a test of a function that returns a program and its inputs for drawn values."""

    def decorate(program: Callable[..., tuple[Any, ...]]) -> Callable[[], None]:
        def test() -> None:
            parts = []
            for values in drawn(st.tuples(*sources), examples(EXAMPLES).max_examples):
                function, *inputs = program(*values)
                parts.append(Part(values, FunctionModule(function), tuple(inputs)))
            hold(parts)

        return test

    return decorate


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def indices(seed: int, size: int, *shape: int) -> torch.Tensor:
    return torch.randint(-size, size, shape, generator=torch.Generator().manual_seed(seed))


@batched(sizes, sizes, sizes, st.integers(1, 12), st.integers(1, 12), st.booleans(), seeds)
def test_antialias(
    channels: int, height: int, width: int, rows: int, columns: int, align: bool, seed: int
) -> tuple[Any, ...]:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(
            x, size=(rows, columns), mode="bilinear", antialias=True, align_corners=align
        )

    return resize, normal(seed, 1, channels, 3 * height, 3 * width)


@batched(st.lists(sizes, min_size=3, max_size=4), st.sampled_from(("i", "i:", ":i", "ij", ":ij", "i:j", "kj")), seeds)
def test_index(shape: list[int], pattern: str, seed: int) -> tuple[Any, ...]:
    def take(x: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        given_indices = iter(index)
        return x[tuple(slice(None) if letter == ":" else next(given_indices) for letter in pattern)]

    axes = [axis for axis, letter in enumerate(pattern) if letter != ":"]
    rows = {"i": (4,), "j": (4,), "k": (3, 1)}
    return take, normal(seed, *shape), *(indices(seed + a, shape[a], *rows[pattern[a]]) for a in axes)


@batched(st.lists(sizes, min_size=1, max_size=3), st.integers(1, 2), st.booleans(), st.booleans(), seeds)
def test_index_put(shape: list[int], count: int, accumulate: bool, whole: bool, seed: int) -> tuple[Any, ...]:
    count = min(count, len(shape))
    # an index that comes twice only has a defined result where values are added
    number = 4 if accumulate else 1

    def put(x: torch.Tensor, value: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        return x.index_put(index, value, accumulate)

    value = normal(seed, number, *shape[count:]) if whole else normal(seed)
    return put, normal(seed, *shape), value, *(indices(seed + a, shape[a], number) for a in range(count))


@batched(st.lists(sizes, min_size=1, max_size=3), st.sampled_from(("add", "sum", "prod", "amax", "amin")), seeds)
def test_scatter(shape: list[int], reduction: str, seed: int) -> tuple[Any, ...]:
    dim = seed % len(shape) - seed % 2 * len(shape)
    # fewer indices than values, along the axes, and any number along the one that is scattered over
    counts = [max(1, size - seed % 3) for size in shape]
    index = indices(seed, shape[dim], *counts) % shape[dim]

    def scatter(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return (
            x.scatter_add(dim, index, values) if reduction == "add" else x.scatter_reduce(dim, index, values, reduction)
        )

    return scatter, normal(seed, *shape), index, normal(seed + 1, *shape)


@batched(st.lists(sizes, min_size=1, max_size=3), seeds)
def test_booleans_are_added_and_multiplied(shape: list[int], seed: int) -> tuple[Any, ...]:
    x, y = (normal(seed + n, *shape) > 0 for n in range(2))
    return lambda x, y: (x + y, x * y, (x + y) * x + y), x, y


@batched(st.lists(sizes, min_size=1, max_size=3), st.booleans(), st.booleans(), seeds)
def test_reductions(shape: list[int], keepdim: bool, is_integer: bool, seed: int) -> tuple[Any, ...]:
    dim = seed % len(shape)
    x = normal(seed, *shape).clamp(min=-0.3)
    x = (x * 2).long() if is_integer else x
    return lambda x: (x.prod(dim, keepdim), x.any(dim, keepdim), x.any(), x.all(dim), x.all(), (x > 0).cumsum(dim)), x


@batched(st.lists(sizes, min_size=1, max_size=3), st.booleans(), seeds)
def test_stable_sort(shape: list[int], descending: bool, seed: int) -> tuple[Any, ...]:
    x = indices(seed, 3, *shape)
    return lambda x: torch.sort(x, dim=seed % len(shape), descending=descending, stable=True), x


@batched(st.sampled_from((torch.bool, torch.int64, torch.float32)), st.sampled_from((2, 3, -1, 0.5, 2.5)), seeds)
def test_numbers_promote_tensors(dtype: torch.dtype, number: float, seed: int) -> tuple[Any, ...]:
    x = indices(seed, 4, 5).to(dtype)

    def arithmetic(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = (x + number, x * number, x / number, x == number, x < number, x.float() - number)
        return wide if dtype is torch.bool else (*wide, x - number, number - x, torch.add(x, x, alpha=2), x.clamp(-1))

    return arithmetic, x


@batched(st.sampled_from((2, 3, 0.1, -0.7, 0.5, -4)), st.booleans(), seeds)
def test_division(divisor: float, is_tensor: bool, seed: int) -> tuple[Any, ...]:
    x = (normal(seed, 64) * 200).round() / 10

    def divide(x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, ...]:
        right = by if is_tensor else divisor
        return x // right, torch.div(x, right, rounding_mode="trunc"), torch.div(x, right, rounding_mode="floor")

    return divide, x, torch.full((64,), float(divisor))


@batched(st.integers(0, 3), sizes, st.sampled_from((0, 1, -1)), seeds)
def test_empty_tensors(count: int, width: int, dim: int, seed: int) -> tuple[Any, ...]:
    """The concatenation of SAM 3's prompts: none or some of each, padded, transposed, counted."""

    def concatenate(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([x.permute(1, 0, 2), y.permute(1, 0, 2)], dim=1)
        lengths = (~mask).sum(dim=-1)
        places = torch.arange(x.shape[0])[:, None].repeat(1, 2) + 0 * lengths[None]
        filled = torch.zeros(4, 2, width).scatter(0, places[:, :, None].expand(-1, -1, width), x)
        return both, lengths, filled, x.sum(0), x.flatten(1), x.cumsum(dim)

    mask = torch.rand(2, count, generator=torch.Generator().manual_seed(seed)) > 0.5
    return concatenate, normal(seed, count, 2, width), normal(seed, 3, 2, width), mask


@batched(st.integers(1, 3), st.integers(1, 3), st.booleans(), seeds)
def test_group_norm(groups: int, per_group: int, affine: bool, seed: int) -> tuple[Any, ...]:
    channels = groups * per_group
    weights = (normal(seed, channels), normal(seed + 1, channels)) if affine else ()
    return lambda x, *w: torch.nn.functional.group_norm(x, groups, *w), normal(seed, 2, channels, 4, 3), *weights


@pytest.mark.smoke
def test_scatter_with_fewer_indices_along_another_axis() -> None:
    holds(lambda x, index, values: x.scatter_add(2, index, values), torch.ones(5, 2, 9), *few_indices())
    holds(lambda x, index, values: x.scatter_reduce(-1, index, values, "prod"), torch.ones(5, 2, 9), *few_indices())


def few_indices() -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [3, 1, 7], and as many values."""
    return indices(0, 9, 3, 1, 7) % 9, normal(1, 3, 1, 7)


def test_fills() -> None:
    holds(
        lambda x: (torch.full((2, 3), math.inf) * x, torch.full((2, 2), -math.inf).triu(1), x.new_full((2,), 3)),
        torch.ones(2, 3),
    )


def test_specials_keep_their_places() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -2.0])
    holds(lambda x: (x.clamp(min=0.0), x.clamp(-1, 1), x != x, x.sign(), x.sigmoid(), x > 0), x)
