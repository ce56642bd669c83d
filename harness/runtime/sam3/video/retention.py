"""What of a bucket's memory the rules of `selection.py` can still read, so that the rest may be forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np

from harness.runtime.sam3.video.rules import DISAMBIGUATED
from harness.runtime.sam3.video.selection import MemoryRules, is_valid

HOTSTART = DISAMBIGUATED.hotstart_frames
"""Frames after their birth within which objects are removed by the planner."""


class Retention(Enum):
    """What is still to come, which decides what is kept.

    Attributes:
        EVERYTHING: Anything: the video may be tracked backwards or again, and users may click on any frame and take
            clicks back. Then every frame can be read again, and nothing is forgotten.
        FORWARD: Later frames alone, each once; a mask or a click on the latest frame makes it conditioning. What is
            forgotten is never read again, unless a user removes an object more than `HOTSTART` frames after its birth:
            then other frames of its bucket may become valid or stop being conditioning, upstream reads older ones
            instead, and these may be gone. At least one conditioning frame of each object is always there.
    """

    EVERYTHING = "everything"
    FORWARD = "forward"


@dataclass(frozen=True)
class Reach:
    """Frames by what of them can still be read.

    Attributes:
        memories: Their memory and their pointer.
        pointers: Their pointer, these included.
        known: That they exist, and their score, these included.
    """

    memories: frozenset[int]
    pointers: frozenset[int]
    known: frozenset[int]


def forward_reach(
    conditioning: Mapping[int, Set[int]],
    scores: Mapping[int, np.float32 | None],
    latest: int,
    rules: MemoryRules,
) -> Reach:
    """What `plan_attention` can read for frames after the latest one, whatever becomes of the latest one.

    Of the conditioning frames the latest four are always the closest (TU:270). That there is a fifth one decides their
    order. Of the frames before the latest one, 15 valid ones decide where the scan ends (TB:552). The pointers of 14
    and the memories of 5 of them can be read, because the frame beside the tracked one comes first, whether it is valid
    or not, and the pointer of the oldest one is left out (TB:555, TB:618, TB:724).

    Args:
        conditioning: The objects that have a click or a mask on each conditioning frame.
        scores: The score of every non-conditioning frame; None for one that has none.
        latest: The latest frame, which may still become conditioning.
        rules: The settings.
    """
    closest = sorted(conditioning, reverse=True)
    most, spatial, span = rules.max_cond_frames_in_attn, rules.num_maskmem - 1, rules.max_obj_ptrs_in_encoder - 1
    memories = {latest, *closest[:most], *_latest_of_each_object(closest, conditioning)}
    known = set(closest[: most + 1])
    if rules.use_memory_selection:
        before = (each for each in sorted(scores, reverse=True) if 0 < each < latest)
        valid = tuple(islice((each for each in before if is_valid(scores[each], rules)), span))
        memories.update(valid[: spatial - 1])
        pointers = {*valid[: span - 1]}
        known.update(valid)
    else:
        recent = [each for each in (*scores, *conditioning) if each > latest - span]
        memories.update(each for each in recent if each > latest - spatial)
        pointers = {*recent}
    return Reach(frozenset(memories), frozenset(pointers | memories), frozenset(known | pointers | memories))


def _latest_of_each_object(closest: Sequence[int], conditioning: Mapping[int, Set[int]]) -> set[int]:
    """So that every object keeps a conditioning frame when the others of its bucket are removed."""
    objects = frozenset[int]().union(*conditioning.values())
    return {next(frame for frame in closest if each in conditioning[frame]) for each in objects}
