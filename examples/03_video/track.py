"""Tracks a clicked object, corrects it, and resumes the session from a file: track.py MODEL SESSION."""

import itertools
import sys
from pathlib import Path

from harness.runtime import Sam3
from harness.runtime.sam3.video.frames import open_frames

CLIP = Path(__file__).parents[2] / "fixtures/videos/bigbuckbunny.mp4"

model = Sam3.load(sys.argv[1])
frames = list(itertools.islice(open_frames(CLIP), 3))  # all of the file: start_session(CLIP, keep=True)
session = model.start_session(frames, keep=True)
session.add_prompt(0, object_id=1, points=[(200, 120)])
for frame in session.propagate():
    print("frame", frame.index, "object", *frame.ids, "pixels", *frame.masks.sum(axis=(1, 2)))
session.add_prompt(1, object_id=1, points=[(20, 20)], labels=[0])
session.save(sys.argv[2])

resumed = model.resume_session(sys.argv[2], frames)
for frame in resumed.propagate(start=1):
    print("corrected: frame", frame.index, "pixels", *frame.masks.sum(axis=(1, 2)))
