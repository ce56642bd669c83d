"""The compiled `resize_masks`, held to what upstream's processor does with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from sam3.model.data_misc import interpolate
from tvm import relax

from conformance.support.examples import examples
from harness.compiler.schedules.common.vm import lower_to_vm
from harness.compiler.targets import TARGETS
from harness.models.sam3.deployed import data_parallel
from harness.models.sam3.deployed.mask_resizing import LARGEST_OUTSIDE, resize_masks_module
from harness.runtime.sam3.images import MASK_SIZE

QUERIES = 200
"""Masks that the detector gives; the entry point takes any number of them."""
SMALL = 128
"""Up to this height + width PyTorch takes another kernel (`_use_vectorized_kernel_cond_2d`), which rounds otherwise."""
ROUNDING = 4 * 2.0**-23
"""By which two bilinear interpolations in fp32 may differ, relative to the largest value."""

Logits = npt.NDArray[np.float32]
Resize = Callable[[Logits, Sequence[int], int, int], npt.NDArray[np.bool_]]


@cache
def compiled(form: Callable[[], tvm.IRModule] = resize_masks_module) -> Resize:
    target = TARGETS["llvm"].tvm_target()
    with target:
        executable = relax.build(lower_to_vm()(form()), target, relax_pipeline=None)
    machine = relax.VirtualMachine(executable, tvm.cpu())

    def resize(masks: Logits, kept: Sequence[int], height: int, width: int) -> npt.NDArray[np.bool_]:
        like = np.empty((height, width, 3), np.uint8)
        result = machine["resize_masks"](*map(tvm.runtime.tensor, (masks, np.array(kept, np.int64), like)))
        return result.numpy()

    return resize


def upstream(masks: Logits, kept: Sequence[int], height: int, width: int) -> tuple[npt.NDArray[np.bool_], Logits]:
    """The masks and the logits at their size, as in `Sam3Processor._forward_grounding`."""
    chosen = torch.from_numpy(masks)[0][list(kept)].unsqueeze(1)
    logits = interpolate(chosen, (height, width), mode="bilinear", align_corners=False)
    return (logits.sigmoid() > 0.5)[:, 0].numpy(), logits[:, 0].numpy()


def check(masks: Logits, kept: Sequence[int], height: int, width: int) -> None:
    got = compiled()(masks, kept, height, width)
    want, logits = upstream(masks, kept, height, width)
    assert got.dtype == np.bool_
    if height + width > SMALL:
        np.testing.assert_array_equal(got, want)
    else:
        decided = ~(np.abs(logits) <= ROUNDING * np.nanmax(np.abs(masks)))
        np.testing.assert_array_equal(got[decided], want[decided])


def normal(seed: int, scale: float = 5.0) -> Logits:
    return np.random.default_rng(seed).standard_normal((1, QUERIES, MASK_SIZE, MASK_SIZE), np.float32) * np.float32(
        scale
    )


NORMAL = normal(0)
EXTENTS = st.one_of(
    st.integers(1, 80),
    st.integers(65, 2200),
    st.sampled_from([144, MASK_SIZE - 1, MASK_SIZE, MASK_SIZE + 1, 576, 1008]),
)
CHOICES = st.lists(st.integers(0, QUERIES - 1), max_size=3)


@examples(60)
@given(height=EXTENTS, width=EXTENTS, kept=CHOICES)
def test_any_size_and_choice(height: int, width: int, kept: list[int]) -> None:
    check(NORMAL, kept, height, width)


@pytest.mark.parametrize(("height", "width"), [(3000, 4000), (1, 9000), (9000, 1), (MASK_SIZE, MASK_SIZE)], ids=str)
def test_extreme_sizes(height: int, width: int) -> None:
    check(NORMAL, [199], height, width)


@examples(10)
@given(height=EXTENTS, width=EXTENTS, share=st.sampled_from([0.001, 0.1]), seed=st.integers(0, 100))
def test_what_is_not_finite(height: int, width: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = NORMAL.copy()
    for value in (np.nan, np.inf, -np.inf):
        masks[0, 0][rng.random((MASK_SIZE, MASK_SIZE)) < share] = value
    check(masks, [0], height, width)


@examples(10)
@given(height=EXTENTS, width=EXTENTS, magnitude=st.sampled_from([1e-7, 1e-6, 1e-30, 1e-42]))
def test_logits_near_zero(height: int, width: int, magnitude: float) -> None:
    check(NORMAL * np.float32(magnitude), [3], height, width)


def test_threshold_is_where_the_sigmoid_rounds_to_a_half() -> None:
    """Every fp32 number around it; at the model's own size nothing is interpolated."""
    bits = np.float32(LARGEST_OUTSIDE).view(np.int32) - QUERIES * MASK_SIZE * MASK_SIZE // 2
    masks = (bits + np.arange(QUERIES * MASK_SIZE * MASK_SIZE, dtype=np.int32)).view(np.float32)
    masks = masks.reshape(1, QUERIES, MASK_SIZE, MASK_SIZE)
    check(masks, range(QUERIES), MASK_SIZE, MASK_SIZE)
    got = compiled()(masks, range(QUERIES), MASK_SIZE, MASK_SIZE)
    assert np.array_equal(got, masks[0] > np.float32(LARGEST_OUTSIDE))
    assert 0 < got.sum() < got.size


def test_nothing_kept() -> None:
    assert compiled()(NORMAL, [], 480, 640).shape == (0, 480, 640)


@pytest.mark.smoke
def test_every_query_in_any_order() -> None:
    kept = np.random.default_rng(1).permutation(QUERIES)
    check(NORMAL, [*kept, *kept[:7]], 97, 101)


@pytest.mark.parametrize("count", [1, 3, QUERIES + 1])
def test_any_number_of_masks(count: int) -> None:
    masks = np.random.default_rng(count).standard_normal((1, count, MASK_SIZE, MASK_SIZE), np.float32)
    check(masks, range(count), 97, 101)


@pytest.mark.parametrize("query", [-1, QUERIES, 2**40])
def test_a_query_that_there_is_not(query: int) -> None:
    with pytest.raises(ValueError, match="numbers of masks, counted from 0"):
        compiled()(NORMAL, [0, query], 480, 640)


@pytest.mark.parametrize(
    ("height", "width", "count"), [(1, 1, 1), (480, 640, 2), (MASK_SIZE, MASK_SIZE, 1), (9, 700, 0)], ids=str
)
def test_the_form_for_gpus_is_the_same_function(height: int, width: int, count: int) -> None:
    got = compiled(form_for_gpus)(NORMAL, range(count), height, width)
    np.testing.assert_array_equal(got, compiled()(NORMAL, range(count), height, width))


def form_for_gpus() -> tvm.IRModule:
    return data_parallel.resize_masks_module("llvm")
