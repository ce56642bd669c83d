"""A video from its first frame to its last: track what is asked for, write each frame as soon as it is given out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core.errors import HarnessError
from harness.runtime import Sam3
from harness.runtime.sam3.video.session import Session, TrackedFrame
from harness.segment.objects import Objects
from harness.track.objects import TrackedObjects
from harness.track.results import Results, VideoDescription

EXAMPLE = "example"
"""What objects are called that a box shows and no text names."""


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        video: A file, or a folder of images.
        text: A noun phrase; None if a box alone says what is meant.
        box: (x0, y0, x1, y1) in pixels around an example; None for none.
        frame: The frame of the box, and where to begin.
        out: Folder of the results; see `harness.track.results.Results`.
        has_overlay: Whether to write a video of the objects.
    """

    video: Path
    text: str | None
    box: Sequence[float] | None
    frame: int
    out: Path
    has_overlay: bool = True

    @property
    def category(self) -> str:
        """What the objects are called."""
        return self.text or EXAMPLE


@dataclass(frozen=True)
class Summary:
    """What was found in a video.

    Attributes:
        frames: How many were processed.
        objects: The ids of all objects that were shown.
    """

    frames: int
    objects: tuple[int, ...]


def run(model: Sam3, job: Job, on_begin: Callable[[int | None], None], on_frame: Callable[[], None]) -> Summary:
    """Tracks a video. A run that was interrupted leaves valid files; the next one computes again what it lacks.

    Args:
        model: The compiled model.
        job: What to do.
        on_begin: Is told how many frames there are to do, None if it is not known.
        on_frame: Is called after each frame that is done.

    Raises:
        HarnessError: A result cannot be written.
        Sam3Error: The video or the prompt cannot be used; the frames before a broken one are written.
    """
    session = model.start_session(job.video)
    frames = session.frames
    if frames.length is not None and not 0 <= job.frame < frames.length:
        raise HarnessError(f"{frames.name} has frames 0 to {frames.length - 1}, and no frame {job.frame}.")
    description = VideoDescription(job.video.name, [job.category], frames.rate, _names(session, job.frame))
    on_begin(None if frames.length is None else frames.length - job.frame)
    session.add_prompt(job.frame, job.text, job.box)
    shown: set[int] = set()
    count = 0
    with Results(job.out, description, _question(model, job), has_overlay=job.has_overlay) as results:
        for frame in session.propagate():
            results.write(frame.index - job.frame, frame.pixels, _objects(frame, job.category))
            shown |= set(frame.ids.tolist())
            count += 1
            on_frame()
    return Summary(count, tuple(sorted(shown)))


def _names(session: Session, first: int) -> tuple[str, ...] | None:
    names = session.frames.names
    return None if names is None else names[first:]


def _objects(frame: TrackedFrame, category: str) -> TrackedObjects:
    height, width = frame.pixels.shape[:2]
    objects = Objects(frame.masks, frame.boxes, frame.scores, (category,) * len(frame.ids), (width, height))
    return TrackedObjects(tuple(frame.ids.tolist()), objects)


def _question(model: Sam3, job: Job) -> dict[str, object]:
    """All that the results depend on."""
    manifest = hashlib.sha256(model.manifest.to_json().encode()).hexdigest()
    asked = {name: value for name, value in asdict(job).items() if name not in ("out", "video", "has_overlay")}
    video = job.video.resolve()
    stamp = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in _files(video)]
    files = hashlib.sha256(json.dumps(stamp).encode()).hexdigest()
    return {"model": manifest, "video": [str(video), files], "asked": json.loads(json.dumps(asked))}


def _files(video: Path) -> list[Path]:
    return sorted(video.iterdir()) if video.is_dir() else [video]
