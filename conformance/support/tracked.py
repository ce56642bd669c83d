"""The results of a video whose objects are known; as a program, for tests that interrupt it:

python -m conformance.support.tracked OUT [LARGEST_FILE] [--slowly]
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from harness.app.segment.objects import Objects
from harness.app.track import Results, TrackedObjects
from harness.app.track.results import VideoDescription
from harness.core.errors import HarnessError
from harness.models.sam3.tracker.scene import SCENE

DESCRIPTION = VideoDescription("scene", [part.name for part in SCENE.parts], Fraction(12))
QUESTION = {"scene": 1}


def tracked(frame: int) -> TrackedObjects:
    """What is seen in a frame of the scene; scores differ by object and frame."""
    masks = SCENE.masks(frame)
    ids = [index for index, mask in enumerate(masks) if mask.any()]
    boxes = []
    for index in ids:
        rows, columns = np.flatnonzero(masks[index].any(axis=1)), np.flatnonzero(masks[index].any(axis=0))
        boxes.append((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
    scores = np.array([0.5 + 0.1 * index + 0.001 * frame for index in ids], np.float32)
    names = tuple(SCENE.parts[index].name for index in ids)
    objects = Objects(masks[ids], np.array(boxes, np.float32).reshape(-1, 4), scores, names, SCENE.size)
    return TrackedObjects(tuple(ids), objects)


def write_scene(out: Path, length: int = SCENE.length) -> Iterator[int]:
    """Writes the first frames of the scene, and gives the number of frames that are done after each of them."""
    with Results(out, DESCRIPTION, QUESTION) as results:
        for frame in range(length):
            results.write(frame, SCENE.picture(frame), tracked(frame))
            yield results.done


def main() -> None:
    """Says how many frames are done after each of them; fails as a command of the project does."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--slowly"]
    if len(arguments) > 1:
        # A file that would grow beyond it cannot be written, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(arguments[1]),) * 2)
    try:
        for done in write_scene(Path(arguments[0])):
            print(done, flush=True)
            if "--slowly" in sys.argv:
                time.sleep(0.02)
    except HarnessError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
