"""Hotstart: young objects that detections do not confirm are removed before anybody sees them (VB:1311-1435)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from harness.runtime.sam3.video.objects import TrackedObject
from harness.runtime.sam3.video.rules import Rules

Duplicates = Mapping[tuple[int, int], int]
"""(older object, younger object) and how many detections they shared so far."""

_Output = TypeVar("_Output")


def shared_detections(
    counted: Duplicates, matches: Iterable[Sequence[int]], first_frames: Mapping[int, int], reverse: bool
) -> dict[tuple[int, int], int]:
    """Counts the detections that objects share, after one more frame (VB:1401-1418).

    Of the objects that a detection matches, the one that was found first is the original, and each other one shares a
    detection with it once more. Among several that were found together the first one in the order of tracking is the
    original. Backwards, the one whose frame has the highest number was found first. Two detections that match the
    same pair count twice on one frame.

    Args:
        counted: The counts before this frame.
        matches: For each detection the ids of the objects that it matches.
        first_frames: For each object the frame on which it was found.
        reverse: Whether frames are processed backwards.
    """
    counts = dict(counted)
    for objects in matches:
        if len(objects) < 2:
            continue
        original = (max if reverse else min)(objects, key=first_frames.__getitem__)
        for duplicate in objects:
            if duplicate != original:
                counts[original, duplicate] = counts.get((original, duplicate), 0) + 1
    return counts


def is_young(first_frame: int, frame: int, rules: Rules, reverse: bool) -> bool:
    """Whether an object that was found on `first_frame` may be removed on `frame` (VB:1336, 1382).

    Forwards, it was found less than `hotstart_frames` frames before. Objects that were found on later frames count as
    young, too; they exist where frames are processed again in another direction.
    """
    if reverse:
        return first_frame < frame + rules.hotstart_frames
    return first_frame > frame - rules.hotstart_frames


def removed(
    objects: Iterable[TrackedObject], duplicates: Duplicates, frame: int, rules: Rules, reverse: bool
) -> frozenset[int]:
    """Ids of the objects that are removed on this frame.

    A young object is removed if no detection showed it on `hotstart_unmatched` frames, which need not follow each other
    (VB:1378-1392). It is also removed if it shared `hotstart_duplicates` detections with one object that was found
    before it (VB:1420-1433).

    Args:
        objects: The tracked objects, with the counts of this frame.
        duplicates: What `shared_detections` counted.
        frame: The number of this frame.
        rules: The thresholds. With 0, as without temporal disambiguation, one is enough, but no object is young
            forwards.
        reverse: Whether frames are processed backwards.
    """
    young = {each.id: each for each in objects if is_young(each.first_frame, frame, rules, reverse)}
    unmatched = {each.id for each in young.values() if each.unmatched >= max(1, rules.hotstart_unmatched)}
    repeated = {
        duplicate
        for (_, duplicate), count in duplicates.items()
        if duplicate in young and count >= max(1, rules.hotstart_duplicates)
    }
    return frozenset(unmatched | repeated)


def released(
    held: tuple[_Output, ...], output: _Output, last: bool, rules: Rules
) -> tuple[tuple[_Output, ...], tuple[_Output, ...]]:
    """Which outputs are held back and which are given out, after one more frame (VI:294-315).

    An output is given out when `hotstart_frames` outputs are held, its own and the ones after it. An object that is
    removed while it is young is thus never seen, if it was found in the same run. After the last frame all are given
    out.

    Args:
        held: The outputs that were held back so far, oldest first.
        output: This frame's output.
        last: Whether this frame is the last one that is processed.
        rules: `hotstart_frames` is how many outputs are held; with 0 none is.

    Returns:
        The outputs that are held back now, and the ones that are given out.
    """
    waiting = (*held, output)
    if last or not rules.hotstart_frames:
        return (), waiting
    if len(waiting) >= rules.hotstart_frames:
        return waiting[1:], waiting[:1]
    return waiting, ()
