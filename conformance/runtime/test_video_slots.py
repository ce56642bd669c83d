"""The slots of SAM 3.1's objects, and what their memories give a frame, against answers of upstream's own code.

`python -m conformance.support.multiplex_truth FOLDER` writes the answers again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.examples import examples
from conformance.support.multiplex_script import FRAMES, Tracked, digest, drawn_script
from harness.core.settings import REPOSITORY
from harness.runtime.sam3.video.memory_bank import Retention
from harness.runtime.sam3.video.slots import SLOTS, Slots, best_fit

RECORDED = json.loads((REPOSITORY / "fixtures" / "sam31_slots.json").read_text())


def scripts() -> Iterator[object]:
    """Yields every script with every retention; half of the pairs are for every night, by seed."""
    for name in RECORDED:
        for number, retention in enumerate(Retention):
            by_day = int(name.split()[0]) % len(Retention) == number
            yield pytest.param(name, retention, marks=[] if by_day else [pytest.mark.wide])


@pytest.mark.parametrize(("name", "retention"), scripts())
def test_every_frame_reads_what_upstream_reads_of_objects_in_the_same_slots(name: str, retention: Retention) -> None:
    seed, count = map(int, name.split())
    script, tracked = drawn_script(seed, count), Tracked(retention=retention)
    assert len(RECORDED[name]) == FRAMES
    for frame, (births, (removed, expected)) in enumerate(zip(script.births, RECORDED[name], strict=True)):
        assert digest(tracked.step(frame, births, removed)) == expected, frame


@pytest.mark.law
def test_objects_outlive_those_that_their_bucket_began_with() -> None:
    """Upstream forgets every memory there, and fails on the next frame."""
    tracked = Tracked()
    tracked.step(0, births=1, removed=())
    tracked.step(1, births=1, removed=(0,))
    (state,) = tracked.step(2, births=0, removed=())
    assert (state["ids"], state["places"], [frame for frame, _ in state["memories"]]) == ([1], [1], [0, 1])


@examples(50)
@given(
    steps=st.lists(
        st.one_of(st.integers(1, 40), st.lists(st.integers(0, 80), min_size=1, max_size=20)), min_size=1, max_size=40
    )
)
def test_a_slot_is_given_once_and_the_others_keep_theirs(steps: list[int | list[int]]) -> None:
    slots = Slots()
    for step in steps:
        count = len(slots.places)
        if isinstance(step, int):
            added = slots.add(step)
            assert added.places[:count] == slots.places
            assert len(added.taken) <= len(slots.taken) + -(-step // SLOTS)
            slots = added
        else:
            rows = {row for row in step if row < count}
            remaining, buckets = slots.remove(rows)
            kept = [place for row, place in enumerate(slots.places) if row not in rows]
            assert [SLOTS * buckets[place // SLOTS] + place % SLOTS for place in remaining.places] == kept
            slots = remaining
        values = np.arange(1, len(slots.places) + 1, dtype=np.float32)
        assert (slots.demux(slots.mux(values)) == values).all()
        assert slots.valid.sum() == len(slots.places) == len(set(slots.places))
        assert all(filled <= SLOTS for filled in slots.taken)


def test_new_objects_fill_the_fullest_group_that_takes_them() -> None:
    groups = [(3, Slots().add(2)), (5, Slots().add(12)), (7, Slots().add(16)), (8, Slots().add(12))]
    assert [best_fit(groups, count) for count in (1, 4, 5, 14, 15)] == [5, 5, 3, 3, None]
