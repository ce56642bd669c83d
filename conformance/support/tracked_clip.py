"""A clip that is tracked into a folder; as a program, for tests that interrupt it:

python -m conformance.support.tracked_clip MODEL CLIP OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.runtime import ObjectPrompt, Sam3
from harness.track.job import Job, Summary, run


def track_click(model: Path, clip: Path, out: Path) -> Summary:
    """Tracks a click; a session is saved after each frame, of which a line tells then."""
    job = Job(clip, [], None, ObjectPrompt([(60, 120)]), 0, out)
    loaded = Sam3.load(model, check=False)
    return run(loaded, job, lambda _: None, lambda: print("a frame", flush=True), save_every=0)


if __name__ == "__main__":
    track_click(*map(Path, sys.argv[1:]))
