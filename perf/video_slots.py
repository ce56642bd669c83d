"""Compares the time of a frame of SAM 3, which tracks objects one by one, with SAM 3.1's, which has sixteen slots.

    python -m perf.video_slots --sam3 dist/sam3-video --sam31 dist/sam31-video --objects 3 --objects 16

Both folders process the same frames in turn, with as many objects as are asked for and full memories.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.runtime import Sam3
from harness.runtime.sam3.description import SAM_3_1
from harness.runtime.sam3.video.multiplex import MultiplexTracker
from harness.runtime.sam3.video.session import Session
from harness.runtime.sam3.video.tracker import Tracker
from perf.videos import FILLED, RULES, TEXT, clip_frames

FRAMES = 4
"""Frames that are measured."""
MANY = replace(RULES, detection_score=0, detection_iou=1, matched_iou=1, new_score=0, recondition_every=0)
"""Rules by which any detection becomes an object, up to the maximum."""


@dataclass(frozen=True)
class Seconds:
    """Times of a frame in seconds.

    Attributes:
        encoding: The encoding of the image, which does not depend on the number of objects.
        together: The whole frame.
    """

    encoding: float
    together: float

    @property
    def tracking(self) -> float:
        """Returns the time without the encoding: detection, tracking, memories, and masks in the video's size."""
        return self.together - self.encoding


def frames(model: Sam3, objects: int) -> Iterator[Seconds]:
    """Processes a video with a number of objects, and yields the time of each frame whose memories are full.

    Raises:
        RuntimeError: Another number of objects is tracked.
    """
    tracker = (MultiplexTracker if model.manifest.model == SAM_3_1 else Tracker)(model.artifact)
    session = Session(model, tracker, clip_frames(), replace(MANY, max_objects=objects))
    session.add_prompt(0, TEXT)
    propagated = session.propagate()
    for number in range(FILLED + FRAMES):
        start = time.perf_counter()
        session.processor.encode_frame(number)  # which the next line finds there
        encoded = time.perf_counter()
        next(propagated)
        if len(session.objects) != objects:
            raise RuntimeError(f"{len(session.objects)} objects are tracked, not {objects}")
        if number >= FILLED:
            yield Seconds(encoded - start, time.perf_counter() - start)


def main() -> None:
    """Prints medians and ratios for each number of objects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sam3", type=Path, required=True)
    parser.add_argument("--sam31", type=Path, required=True)
    parser.add_argument("--objects", type=int, action="append", required=True)
    arguments = parser.parse_args()
    models = [Sam3.load(folder) for folder in (arguments.sam3, arguments.sam31)]
    for objects in arguments.objects:
        sides = list(zip(*(frames(model, objects) for model in models), strict=True))
        for name in ("together", "encoding", "tracking"):
            first, second = (statistics.median(getattr(side[place], name) for side in sides) for place in (0, 1))
            ratios = sorted(getattr(before, name) / getattr(after, name) for before, after in sides)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{objects} objects, {name}: {first:.3f} s, {second:.3f} s, ratio {first / second:.2f} ({spread})")


if __name__ == "__main__":
    main()
