"""What several references contain is computed once, and nothing of them changes by that."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.parity.cache import ArrayCache
from harness.parity.oracle import oracle, reference
from harness.parity.part_cache import cache_part
from harness.parity.references import Reference


class Trunk(nn.Module):
    """Counts its calls; its output lies in memory in another order than its axes, as the vision transformer's does."""

    calls: ClassVar[list[torch.dtype]] = []  # of the class, because the oracle runs a copy

    def __init__(self) -> None:
        super().__init__()
        self.calls.clear()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("scale", torch.tensor([0.1, 0.7, 1.3, 2.9]))
        self.noise = 0.0

    def forward(self, image: Tensor) -> list[Tensor]:
        self.calls.append(image.dtype)
        return [(self.linear(image) * self.scale + self.noise * len(self.calls)).permute(0, 3, 1, 2)]


class Neck(nn.Module):
    """Tells the layout of what it reads by what it returns."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk
        self.conv = nn.Conv2d(4, 3, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        (features,) = self.trunk(image)
        return self.conv(features), torch.tensor(features.stride()), torch.tensor(self.trunk.scale.dtype.itemsize)


NAMES = ("out", "strides", "width")


@pytest.fixture
def trunk() -> Trunk:
    torch.manual_seed(0)
    return Trunk()


@pytest.fixture
def neck(trunk: Trunk) -> Neck:
    return Neck(trunk)


@pytest.fixture
def image() -> Tensor:
    return torch.rand(2, 5, 7, 6)


@pytest.fixture
def cache(tmp_path) -> ArrayCache:
    return ArrayCache(tmp_path / "cache")


@pytest.mark.parametrize("run", [reference, oracle])
def test_results_are_bitwise_those_of_the_part_itself(run, trunk, neck, image, cache):
    plain = run(neck, (image,), NAMES)
    trunk.calls.clear()
    for _ in range(3):
        with cache_part(trunk, cache, {}):
            found = run(neck, (image,), NAMES)
        assert found.keys() == plain.keys()
        for name, array in plain.items():
            np.testing.assert_array_equal(found[name], array, strict=True)
    assert len(trunk.calls) == 1


def test_another_module_with_the_same_part_does_not_compute_it_again(trunk, neck, image, cache):
    with cache_part(trunk, cache, {}):
        neck(image)
    with cache_part(trunk, cache, {}):
        Neck(trunk)(image)
    assert len(trunk.calls) == 1


def test_what_is_run_twice_stays_two_runs(trunk, neck, image, cache):
    """So that a reference that does not repeat is still found out."""
    trunk.noise = 1e-3
    with cache_part(trunk, cache, {}):
        both = Reference.run_twice(lambda: reference(neck, (image,), NAMES)).to_arrays()
    assert len(trunk.calls) == 2
    assert "again/out" in both
    with cache_part(trunk, cache, {}):
        later = Reference.run_twice(lambda: reference(neck, (image,), NAMES)).to_arrays()
    assert len(trunk.calls) == 2
    np.testing.assert_array_equal(later["again/out"], both["again/out"])


@pytest.mark.parametrize("change", ["input", "dtype", "key"])
def test_what_it_depends_on_makes_another_entry(change, trunk, neck, image, cache):
    with cache_part(trunk, cache, {"weights": "seed 0"}):
        reference(neck, (image,), NAMES)
    with cache_part(trunk, cache, {"weights": "seed 1" if change == "key" else "seed 0"}):
        run = oracle if change == "dtype" else reference
        run(neck, (image + 1 if change == "input" else image,), NAMES)
    assert len(trunk.calls) == 2


def test_the_part_is_itself_again_afterwards(trunk, neck, image, cache):
    with pytest.raises(RuntimeError), cache_part(trunk, cache, {}):
        neck(image[..., :3])
    assert type(trunk) is Trunk
    with cache_part(trunk, cache, {}):
        neck(image)
    neck(image)
    assert len(trunk.calls) == 3
