"""A clip that is tracked into a folder; as a program, for tests that interrupt it:

python -m conformance.support.tracked_clip MODEL CLIP OUT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from harness.app.track.job import Job, Summary, run
from harness.runtime import ObjectPrompt, Sam3


def track_click(
    model: Path,
    clip: Path,
    out: Path,
    on_begin: Callable[[int | None], None] = lambda _: None,
    on_frame: Callable[[], None] = lambda: None,
) -> Summary:
    """Tracks a click; a session is saved after each frame, before `on_frame` is called."""
    job = Job(clip, [], None, ObjectPrompt([(60, 120)]), 0, out)
    loaded = Sam3.load(model, check=False)
    return run(loaded, job, on_begin, on_frame, save_every=0)


def tell_and_wait() -> None:
    """A line tells of a frame; the next one is processed when a line has come."""
    print("a frame", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    model_folder, clip_folder, results = map(Path, sys.argv[1:])
    track_click(model_folder, clip_folder, results, on_frame=tell_and_wait)
