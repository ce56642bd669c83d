"""Finds the entries of a bucket's memory that the rules of `selection.py` can still read; others can be dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np

from harness.runtime.sam3.video.rules import DISAMBIGUATED
from harness.runtime.sam3.video.selection import MemoryRules, is_valid

HOTSTART = DISAMBIGUATED.hotstart_frames
"""Frames after its birth within which the planner may remove an object."""


class Retention(Enum):
    """The future use of a memory bank, which decides what is kept.

    Attributes:
        EVERYTHING: Any use: the video may be tracked backwards or again, and users may click any frame and remove
            clicks. Then every frame can be read again, and nothing is dropped.
        FORWARD: Later frames alone, each once; a mask or a click on the latest frame makes it conditioning. Dropped
            entries are never read again, with one exception: a user removes an object more than `HOTSTART` frames after
            its birth. Then other frames of its bucket may become valid or stop being conditioning, and upstream reads
            older ones instead, which may have been dropped. At least one conditioning frame of each object is always
            kept.
    """

    EVERYTHING = "everything"
    FORWARD = "forward"


@dataclass(frozen=True)
class Reach:
    """Frames by what can still be read of them.

    Attributes:
        memories: Frames whose memory and pointer can be read.
        pointers: Frames whose pointer can be read, including those of `memories`.
        scored: Frames whose existence and score can be read, including all others.
    """

    memories: frozenset[int]
    pointers: frozenset[int]
    scored: frozenset[int]


def forward_reach(
    conditioning: Mapping[int, Set[int]],
    scores: Mapping[int, np.float32 | None],
    latest: int,
    rules: MemoryRules,
) -> Reach:
    """Returns what `plan_attention` can read for frames after the latest one, whatever the latest one becomes.

    The latest four conditioning frames are always the closest (TU:270); whether there is a fifth one decides their
    order. Among the frames before the latest one, 15 valid ones decide where the scan ends (TB:552). The pointers of 14
    and the memories of 5 of them can be read. The frame beside the tracked one comes first, whether it is valid or not,
    and the pointer of the oldest one is left out (TB:555, TB:618, TB:724).

    Args:
        conditioning: The objects that have a click or a mask on each conditioning frame.
        scores: The score of every non-conditioning frame; None for a frame without one.
        latest: The latest frame, which may still become conditioning.
        rules: The settings.
    """
    closest = sorted(conditioning, reverse=True)
    limit, spatial, span = rules.max_cond_frames_in_attn, rules.num_maskmem - 1, rules.max_obj_ptrs_in_encoder - 1
    memories = {latest, *closest[:limit], *_latest_per_object(closest, conditioning)}
    scored = set(closest[: limit + 1])
    if rules.use_memory_selection:
        earlier_frames = (frame for frame in sorted(scores, reverse=True) if 0 < frame < latest)
        valid = tuple(islice((frame for frame in earlier_frames if is_valid(scores[frame], rules)), span))
        memories.update(valid[: spatial - 1])
        pointers = {*valid[: span - 1]}
        scored.update(valid)
    else:
        recent = [frame for frame in (*scores, *conditioning) if frame > latest - span]
        memories.update(frame for frame in recent if frame > latest - spatial)
        pointers = {*recent}
    return Reach(frozenset(memories), frozenset(pointers | memories), frozenset(scored | pointers | memories))


def _latest_per_object(closest: Sequence[int], conditioning: Mapping[int, Set[int]]) -> set[int]:
    """Returns the latest conditioning frame of each object, which it needs when its bucket's others are removed."""
    objects = frozenset[int]().union(*conditioning.values())
    return {next(frame for frame in closest if object_id in conditioning[frame]) for object_id in objects}
