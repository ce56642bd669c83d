"""The judge of what a user gets: every fault is seen where it is, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.outcome import VerdictKind
from harness.core.program import Arrays
from harness.models.sam3.detections import BOX_PIXELS, SCORE, judge_detections
from harness.parity.references import Reference

pytestmark = pytest.mark.law

QUERIES, KEPT, HEIGHT, WIDTH = 200, 5, 7, 9
NAMES = ("queries", "masks", "boxes", "scores")


def truth(seed: int = 0) -> Reference:
    """Five of 200 queries are kept; in each mask, the pixels of the first line are undecided."""
    rng = np.random.default_rng(seed)
    queries = np.zeros(QUERIES, bool)
    queries[rng.choice(QUERIES, KEPT, replace=False)] = True
    boxes = rng.uniform(0, 600, (KEPT, 4))
    scores = rng.uniform(0.5, 1, KEPT)
    undecided = np.zeros((KEPT, HEIGHT, WIDTH), bool)
    undecided[:, 0] = True
    masks = rng.random((KEPT, HEIGHT, WIDTH)) > 0.5
    fields = (queries, masks, boxes.astype(np.float32), scores.astype(np.float32))
    found = dict(zip(NAMES, fields, strict=True)) | {"undecided": undecided}
    return Reference(found, found, {"boxes": boxes, "scores": scores})


def kinds(actual: Arrays, expected: Reference) -> dict[str, VerdictKind]:
    verdicts = judge_detections("text/", actual, expected)
    assert [verdict.name for verdict in verdicts] == [f"text/{name}" for name in NAMES]
    return dict(zip(NAMES, (verdict.kind for verdict in verdicts), strict=True))


def changed(found: Arrays, name: str, index: Any, value: Any) -> Arrays:
    array = found[name].copy()
    array[index] = value
    return found | {name: array}


def only(name: str, kind: VerdictKind = VerdictKind.FAILED) -> dict[str, VerdictKind]:
    return dict.fromkeys(NAMES, VerdictKind.STRICT) | {name: kind}


def test_what_upstream_finds_is_strict() -> None:
    verdicts = judge_detections("", truth().first, truth())
    assert [(verdict.kind, verdict.outside, verdict.reason) for verdict in verdicts] == [
        (VerdictKind.STRICT, 0, "")
    ] * 4
    assert verdicts[2].r_rms <= 1
    assert verdicts[3].max_abs == 0


@given(st.integers(0, KEPT - 1), st.integers(0, HEIGHT - 1), st.integers(0, WIDTH - 1))
def test_a_flipped_pixel_is_seen_where_it_is_decided(query: int, y: int, x: int) -> None:
    expected = truth()
    at = (query, y, x)
    actual = changed(expected.first, "masks", at, ~expected.first["masks"][at])
    verdict = judge_detections("", actual, expected)[1]
    if expected.first["undecided"][at]:
        assert kinds(actual, expected) == only("masks", VerdictKind.STRICT)
        assert verdict.reason == "1 pixels differ, all of which have a logit within 0.0001 of zero"
    else:
        assert kinds(actual, expected) == only("masks")
        assert (verdict.outside, verdict.elements) == (1, KEPT * HEIGHT * WIDTH)
        assert verdict.reason == "1 of 315 pixels differ, and their logit is not near zero"


@given(st.integers(0, KEPT - 1), st.integers(0, 3), st.sampled_from([0.5, 2.0, -2.0]))
def test_a_shifted_box_is_seen_beyond_the_limit(query: int, corner: int, limits: float) -> None:
    expected = truth()
    at = (query, corner)
    actual = changed(expected.first, "boxes", at, expected.first["boxes"][at] + limits * BOX_PIXELS)
    assert kinds(actual, expected) == only("boxes", VerdictKind.FAILED if abs(limits) > 1 else VerdictKind.STRICT)


@given(st.integers(0, KEPT - 1), st.sampled_from([0.5, 2.0, -2.0]))
def test_another_score_is_seen_beyond_the_limit(query: int, limits: float) -> None:
    expected = truth()
    actual = changed(expected.first, "scores", query, expected.first["scores"][query] + limits * SCORE)
    assert kinds(actual, expected) == only("scores", VerdictKind.FAILED if abs(limits) > 1 else VerdictKind.STRICT)


@given(st.integers(0, KEPT - 1))
def test_a_dropped_query_is_seen_everywhere(query: int) -> None:
    expected = truth()
    found = expected.first
    actual = changed(found, "queries", np.flatnonzero(found["queries"])[query], False)
    actual |= {name: np.delete(found[name], query, axis=0) for name in ("masks", "boxes", "scores")}
    assert set(kinds(actual, expected).values()) == {VerdictKind.FAILED}


@given(st.permutations(range(KEPT)))
def test_queries_out_of_order_are_seen(order: list[int]) -> None:
    expected = truth()
    found = expected.first
    actual = found | {name: found[name][order] for name in ("masks", "boxes", "scores")}
    wrong = VerdictKind.STRICT if order == list(range(KEPT)) else VerdictKind.FAILED
    assert kinds(actual, expected) == dict.fromkeys(NAMES, wrong) | {"queries": VerdictKind.STRICT}


def test_another_query_instead_is_seen() -> None:
    expected = truth()
    kept = expected.first["queries"]
    actual = changed(expected.first, "queries", np.flatnonzero(kept)[0], False)
    actual = changed(actual, "queries", np.flatnonzero(~kept)[0], True)
    assert kinds(actual, expected) == only("queries")


@pytest.mark.parametrize("name", ["boxes", "scores"])
def test_nan_and_another_dtype_are_seen(name: str) -> None:
    expected = truth()
    assert kinds(changed(expected.first, name, 0, np.nan), expected) == only(name)
    wide = expected.first | {name: expected.first[name].astype(np.float64)}
    assert kinds(wide, expected) == only(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_that_cannot_repeat_itself_is_no_reference(name: str) -> None:
    expected = truth()
    again = expected.first[name].copy()
    again.flat[0] = ~again.flat[0] if again.dtype == bool else np.nextafter(again.flat[0], np.float32(1e9))
    unstable = Reference(expected.first, expected.first | {name: again}, expected.exact)
    assert kinds(expected.first, unstable) == only(name, VerdictKind.NOT_JUDGEABLE)
