"""The metrics: laws over arbitrary arrays, and agreement with the plain formulas."""

from __future__ import annotations

import math
import tracemalloc

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.parity import metrics
from harness.parity.metrics import ATOL, RTOL, bitwise_different, difference, mask_mismatches, oracle_ratio, unequal

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
anything = st.floats(width=32)
moderate = st.floats(min_value=-1e6, max_value=1e6, width=32)
shapes = hnp.array_shapes(min_dims=0, max_dims=4, max_side=6)


def arrays(elements: st.SearchStrategy[float], count: int = 2) -> st.SearchStrategy[tuple[np.ndarray, ...]]:
    """Several fp32 arrays of one arbitrary shape."""
    return shapes.flatmap(lambda shape: st.tuples(*[hnp.arrays(np.float32, shape, elements=elements)] * count))


@given(arrays(finite))
def test_required_tolerance_is_tight(pair):
    a, r = pair
    t = difference(a, r).required_tolerance
    wide_a, wide_r = a.astype(np.float64), r.astype(np.float64)
    assert np.all(np.abs(wide_a - wide_r) <= t + t * np.abs(wide_r))
    if t == 0:
        assert np.array_equal(a, r)
    else:
        smaller = t * (1 - 1e-6)
        assert not np.all(np.abs(wide_a - wide_r) <= smaller + smaller * np.abs(wide_r))


@given(arrays(moderate))
def test_metrics_are_their_formulas(pair):
    a, r = (x.astype(np.float64) for x in pair)
    d = difference(*pair)
    error = np.abs(a - r)
    assert d.elements == a.size
    assert d.outside == np.count_nonzero(error > ATOL + RTOL * np.abs(r))
    assert d.max_abs == error.max()
    assert d.mean_abs == pytest.approx(error.mean(), rel=1e-12)
    relative = error[r != 0] / np.abs(r[r != 0])
    assert d.max_rel == (relative.max() if relative.size else 0)
    if (error > 0).any() and (r != 0).any():
        assert d.sqnr_db == pytest.approx(10 * math.log10((r**2).sum() / (error**2).sum()), abs=1e-9)
    assert d.mean_abs <= d.max_abs * (1 + 1e-12)


@given(arrays(moderate))
def test_the_gate_and_the_required_tolerance_agree(pair):
    d = difference(*pair)
    assume(abs(d.required_tolerance - ATOL) > 1e-15)  # exactly on the edge the last rounding decides
    assert (d.outside == 0) == (d.required_tolerance <= ATOL)


@given(arrays(finite), st.randoms(use_true_random=False))
def test_order_and_sign_do_not_matter(pair, random):
    a, r = (x.reshape(-1) for x in pair)
    order = list(range(a.size))
    random.shuffle(order)
    plain, shuffled, negated = difference(a, r), difference(a[order], r[order]), difference(-a, -r)
    assert negated == plain
    for name in ("outside", "max_abs", "max_rel", "required_tolerance"):
        assert getattr(shuffled, name) == getattr(plain, name)
    assert shuffled.mean_abs == pytest.approx(plain.mean_abs, rel=1e-12)


@given(arrays(st.floats(min_value=2**-10, max_value=2**10, width=32), 3), st.integers(-10, 10))
def test_ratios_do_not_depend_on_the_unit(triple, exponent):
    a, r, o = triple[0], triple[1], triple[2].astype(np.float64)
    scale = np.float32(2.0**exponent)
    plain, scaled = difference(a, r), difference(a * scale, r * scale)
    assert scaled.max_rel == plain.max_rel
    assert scaled.sqnr_db == pytest.approx(plain.sqnr_db, abs=1e-9) or (plain.sqnr_db == scaled.sqnr_db == math.inf)
    assert scaled.max_abs == plain.max_abs * scale
    before, after = oracle_ratio(a, r, o), oracle_ratio(a * scale, r * scale, o * float(scale))
    assert after.r_rms == pytest.approx(before.r_rms, rel=1e-9)
    assert after.r_inf == pytest.approx(before.r_inf, rel=1e-9)


@given(arrays(anything))
def test_masks_are_compared_and_specials_left_out(pair):
    a, r = pair
    same = (np.isfinite(a) & np.isfinite(r)) | (np.isnan(a) & np.isnan(r)) | (np.isinf(a) & (a == r))
    d = difference(a, r)
    assert mask_mismatches(a, r) == np.count_nonzero(~same)
    assert d.outside >= np.count_nonzero(~same)
    assert not math.isnan(d.required_tolerance) or not (np.isfinite(a) & np.isfinite(r)).any()
    if not same.all():
        assert d.required_tolerance == math.inf
    both = np.isfinite(a) & np.isfinite(r)
    if both.any():
        assert d.max_abs == np.abs(a[both].astype(np.float64) - r[both]).max()
    else:
        assert math.isnan(d.max_abs)


@given(arrays(anything))
def test_bitwise_comparison_knows_nan_and_zero(pair):
    a, b = pair
    differ = (a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))
    assert bitwise_different(a, b) == np.count_nonzero(differ)
    assert bitwise_different(a, a.copy()) == 0


def test_bitwise_comparison_of_the_special_cases():
    quiet = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert bitwise_different(quiet[:1], quiet[1:]) == 0
    assert bitwise_different(np.float32([0.0]), np.float32([-0.0])) == 1
    assert bitwise_different(np.float32([1.0]), np.nextafter(np.float32([1.0]), np.float32(2))) == 1
    assert bitwise_different(np.zeros(3, np.float32), np.zeros(3, np.float64)) == 3


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, np.bool_])
def test_integers_and_booleans_are_counted_in_their_own_dtype(dtype):
    r = np.array([0, 1, 1, 0]).astype(dtype)
    a = r.copy()
    a[2] = 0
    assert unequal(a, r) == 1
    assert unequal(r, r.copy()) == 0
    assert metrics.is_exact(r.dtype)


def test_neighbouring_large_integers_are_unequal():
    r = np.array([2**60], np.int64)
    assert unequal(r + 1, r) == 1


def test_complex_error_is_the_distance_in_the_plane():
    r = np.array([1 + 1j, 2, 0j], np.complex64)
    a = r + np.array([3e-3 + 4e-3j, 0, 0], np.complex64)
    d = difference(a, r)
    assert d.max_abs == pytest.approx(5e-3, rel=1e-4)
    assert d.outside == 1
    a[1] = complex(math.nan, 0)
    assert mask_mismatches(a, r) == 1


def test_nothing_to_measure_is_nan_and_never_a_number():
    empty = np.zeros((0, 3), np.float32)
    d = difference(empty, empty)
    assert d.outside == d.elements == 0
    assert all(math.isnan(x) for x in (d.max_abs, d.mean_abs, d.max_rel, d.required_tolerance, d.sqnr_db))
    ratio = oracle_ratio(empty, empty, empty.astype(np.float64))
    assert math.isnan(ratio.r_rms) and math.isnan(ratio.r_inf)


def test_shapes_must_agree_instead_of_broadcasting():
    with pytest.raises(ValueError, match="shapes differ"):
        difference(np.zeros((3, 1), np.float32), np.zeros((1, 3), np.float32))


def test_oracle_ratio_is_its_formula():
    rng = np.random.default_rng(0)
    o = rng.normal(size=5000)
    r = (o + rng.normal(scale=1e-5, size=o.shape)).astype(np.float32)
    a = (o + rng.normal(scale=3e-5, size=o.shape)).astype(np.float32)
    ratio = oracle_ratio(a, r, o)
    assert ratio.r_rms == pytest.approx(math.sqrt(((a - o) ** 2).mean() / ((r - o) ** 2).mean()), rel=1e-12)
    assert ratio.r_inf == pytest.approx(np.abs(a - o).max() / np.abs(r - o).max(), rel=1e-12)


def test_the_floor_stands_in_for_an_exact_reference():
    o = np.full(100, 2.0)
    exact = o.astype(np.float32)
    eps = np.finfo(np.float32).eps
    two_roundings = (o * (1 + 2 * eps)).astype(np.float32)
    assert oracle_ratio(exact, exact, o).r_rms == 0
    assert oracle_ratio(two_roundings, exact, o).r_rms == pytest.approx(0.5, rel=1e-6)
    assert oracle_ratio(two_roundings, exact, o).r_inf == pytest.approx(0.5, rel=1e-6)


def test_nothing_is_forgiven_where_oracle_and_reference_are_zero():
    zero = np.zeros(3, np.float32)
    assert oracle_ratio(zero, zero, zero.astype(np.float64)) == metrics.OracleRatio(0.0, 0.0)
    infinite = metrics.OracleRatio(math.inf, math.inf)
    assert oracle_ratio(zero + np.float32(1e-30), zero, zero.astype(np.float64)) == infinite


def test_many_chunks_are_the_whole_and_any_memory_layout_is_read():
    rng = np.random.default_rng(1)
    r = rng.normal(size=(7, 300, 401)).astype(np.float32)
    a = r + rng.normal(scale=1e-5, size=r.shape).astype(np.float32)
    a[3, 200, 100] += 1
    whole = difference(a, r)
    error = np.abs(a.astype(np.float64) - r)
    assert whole.outside == np.count_nonzero(error > ATOL + RTOL * np.abs(r.astype(np.float64)))
    assert whole.max_abs == error.max()
    assert whole.mean_abs == pytest.approx(error.mean(), rel=1e-12)
    assert difference(np.asfortranarray(a), r) == whole
    strided = np.zeros((7, 300, 802), np.float32)[:, :, ::2]
    strided[...] = a
    assert difference(strided, r) == whole
    assert unequal(a, r) == np.count_nonzero(a != r)
    assert bitwise_different(np.asfortranarray(a), a) == 0


def test_memory_stays_small():
    a, r = np.ones(4_000_000, np.float32), np.ones(4_000_000, np.float32)
    o = np.ones(4_000_000)
    tracemalloc.start()
    try:
        difference(a, r)
        oracle_ratio(a, r, o)
        bitwise_different(a, r)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24e6  # one float64 copy alone would be 32e6
