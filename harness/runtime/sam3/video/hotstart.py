"""Applies hotstart: young objects that detections do not confirm are removed before they are shown (VB:1311-1435)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from harness.runtime.sam3.video.objects import TrackedObject
from harness.runtime.sam3.video.rules import Rules

Duplicates = Mapping[tuple[int, int], int]
"""Number of detections that (older object, younger object) have shared so far."""

_Output = TypeVar("_Output")


def count_shared_detections(
    counted: Duplicates, matches: Iterable[Sequence[int]], first_frames: Mapping[int, int], reverse: bool
) -> dict[tuple[int, int], int]:
    """Counts the detections that objects share, after one more frame (VB:1401-1418).

    Among the objects that a detection matches, the one that was found first is the original, and every other one shares
    a detection with it once more. If several were found together, the original is the first one in the order of
    tracking. Backwards, the object whose frame has the highest number was found first. Two detections that match the
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
    """Returns whether an object that was found on `first_frame` may be removed on `frame` (VB:1336, 1382).

    Forwards, it was found less than `hotstart_frames` frames before. Objects that were found on later frames count as
    young, too; they exist where frames are processed again in another direction.
    """
    if reverse:
        return first_frame < frame + rules.hotstart_frames
    return first_frame > frame - rules.hotstart_frames


def removed_objects(
    objects: Iterable[TrackedObject], duplicates: Duplicates, frame: int, rules: Rules, reverse: bool
) -> frozenset[int]:
    """Returns the ids of the objects that are removed on this frame.

    A young object is removed if no detection showed it on `hotstart_unmatched` frames, which need not be consecutive
    (VB:1378-1392). It is also removed if it shared `hotstart_duplicates` detections with one object that was found
    before it (VB:1420-1433).

    Args:
        objects: The tracked objects, with the counts of this frame.
        duplicates: The result of `count_shared_detections`.
        frame: The number of this frame.
        rules: The thresholds. A threshold of 0, as without temporal disambiguation, counts as 1, but no object is young
            forwards.
        reverse: Whether frames are processed backwards.
    """
    young = {item.id: item for item in objects if is_young(item.first_frame, frame, rules, reverse)}
    unmatched = {item.id for item in young.values() if item.unmatched >= max(1, rules.hotstart_unmatched)}
    repeated = {
        duplicate
        for (_, duplicate), count in duplicates.items()
        if duplicate in young and count >= max(1, rules.hotstart_duplicates)
    }
    return frozenset(unmatched | repeated)


def release_outputs(
    buffer: tuple[_Output, ...], output: _Output, last: bool, rules: Rules
) -> tuple[tuple[_Output, ...], tuple[_Output, ...]]:
    """Adds an output to the hotstart buffer; returns the new buffer and the outputs that leave it (VI:294-315).

    An output leaves the buffer when the buffer has `hotstart_frames` outputs. An object that is removed while it is
    young is thus never shown, if it was found in the same run. After the last frame all outputs leave.

    Args:
        buffer: The buffer, oldest output first.
        output: This frame's output.
        last: Whether this frame is the last one that is processed.
        rules: `hotstart_frames` is the size of the buffer; 0 means no buffer.

    Returns:
        The buffer, and the outputs that leave it.
    """
    buffered = (*buffer, output)
    if last or not rules.hotstart_frames:
        return (), buffered
    if len(buffered) >= rules.hotstart_frames:
        return buffered[1:], buffered[:1]
    return buffered, ()
