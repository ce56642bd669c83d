"""Tracks objects through a video, writes each frame as soon as it is returned, and saves the session to continue it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.app.results.journal import is_whole, results_folder
from harness.app.results.objects import Objects, run_lengths
from harness.app.track.results import MASKS, OVERLAY, Results, VideoDescription
from harness.core.errors import HarnessError
from harness.runtime import ObjectPrompt, Sam3
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.frames import frame_files
from harness.runtime.sam3.video.saving import model_digest
from harness.runtime.sam3.video.session import Session, TrackedFrame

SAVE_INTERVAL = 10.0
"""Seconds between two files, and thus the most work that is lost when a run is stopped."""


_PREFIX = ".session-"


def session_file(out: Path, question: dict[str, Any]) -> Path:
    """Returns the session file of a run, whose name depends on all inputs of the results."""
    return out / f"{_PREFIX}{hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16]}.safetensors"


class SavedSession:
    """Saves a session at intervals.

    A new file replaces the one before when another frame has been written. The results thus never lack a frame that the
    session has returned, because the last frame of a video may not be on the disk yet.
    """

    def __init__(self, path: Path, interval: float = SAVE_INTERVAL) -> None:
        """Removes the files of other runs.

        Args:
            path: The file, whose folder exists.
            interval: Seconds between two files.
        """
        self._path, self._interval = path, interval
        self._new = path.with_name(f"{path.name}.new")
        for pattern in (f"{_PREFIX}*", f".{_PREFIX}*.tmp"):
            for stale in path.parent.glob(pattern):
                if stale != path:
                    stale.unlink(missing_ok=True)
        self._saved_at = time.monotonic()
        self._has_written = False

    def save_if_due(self, session: Session) -> None:
        """Saves the session if the interval has passed; must be called after each processed frame.

        Raises:
            ModelError: The file cannot be written.
        """
        if time.monotonic() - self._saved_at >= self._interval:
            session.save(self._new if self._has_written else self._path)
            self._saved_at = time.monotonic()

    def confirm_frame(self) -> None:
        """Replaces the file by the new one; must be called after each written frame of the results."""
        self._has_written = True
        if self._new.exists():
            self._new.replace(self._path)

    def remove(self) -> None:
        """Removes the files when the video is finished."""
        self._new.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)


EXAMPLE = "example"
"""Category of objects that a box or clicks show and no text names."""


@dataclass(frozen=True)
class Job:
    """The inputs of a run.

    Attributes:
        video: A file, or a folder of images.
        texts: Noun phrases; none if a box or clicks alone are the prompt.
        box: (x0, y0, x1, y1) in pixels around an example; None for none.
        clicked: Clicks on one object and its box, instead of texts and an example.
        frame: The frame of the box and the clicks, and the first frame.
        out: Folder of the results; see `harness.app.track.results.Results`.
        has_overlay: Whether to write a video of the objects.
    """

    video: Path
    texts: Sequence[str]
    box: Sequence[float] | None
    clicked: ObjectPrompt | None
    frame: int
    out: Path
    has_overlay: bool = True

    @property
    def categories(self) -> Sequence[str]:
        """The categories of the objects."""
        return self.texts or [EXAMPLE]

    def add_prompt(self, session: Session) -> None:
        """Adds the prompts to a session.

        Raises:
            ModelError: They are invalid for this video.
        """
        if self.clicked is None:
            session.add_prompt(self.frame, list(self.texts), self.box)
        else:
            clicked = self.clicked
            session.add_prompt(self.frame, object_id=0, points=clicked.points, labels=clicked.labels, box=clicked.box)


@dataclass(frozen=True)
class Summary:
    """The summary of a run.

    Attributes:
        frames: Number of frames of the video.
        processed: Number of frames that this run has processed; 0 if an earlier run has finished.
        objects: The ids of all objects that were shown.
    """

    frames: int
    processed: int
    objects: tuple[int, ...]


def run(
    model: Sam3,
    job: Job,
    on_begin: Callable[[int | None], None],
    on_frame: Callable[[], None],
    save_every: float = SAVE_INTERVAL,
) -> Summary:
    """Tracks a video. A run that was stopped leaves valid files, and the next one continues it.

    Args:
        model: The compiled model.
        job: The job.
        on_begin: Called with the number of frames to process, None if it is not known.
        on_frame: Called after each processed frame.
        save_every: Seconds of work that may be lost when a run is stopped.

    Raises:
        HarnessError: A result cannot be written, or the folder has files of these names that no earlier run wrote; or
            another command is writing it.
        ModelError: The video or the prompt cannot be used; the frames before a broken one are written.
    """
    session = model.start_session(job.video)
    frames = session.frames
    if frames.length is not None and not 0 <= job.frame < frames.length:
        raise HarnessError(f"{frames.name} has frames 0 to {frames.length - 1}, and no frame {job.frame}.")
    for path in (job.out / MASKS, job.out / OVERLAY):
        if path.resolve() == job.video.resolve():
            raise HarnessError(f"{path} would be replaced; give another folder with --out.")
    question = _question(model, job)
    session_path = session_file(job.out, question)
    resumed = _resumed(model, job.video, session_path)
    is_new = resumed is None and not is_whole(job.out, question)
    if is_new:
        job.add_prompt(session)  # before the folder is made, because the prompt may be invalid
    names = None if frames.names is None else frames.names[job.frame :]
    description = VideoDescription(job.video.name, job.categories, frames.rate, names)
    with results_folder(job.out):
        with Results(job.out, description, question, has_overlay=job.has_overlay) as results:
            saves = SavedSession(session_path, save_every)
            if results.is_whole:
                saves.remove()
                return Summary(results.done, 0, tuple(sorted(results.ids(results.done))))
            if resumed is not None and resumed.position is not None and resumed.position <= job.frame + results.done:
                session = resumed
            elif not is_new:
                job.add_prompt(session)
            summary = _track(session, job.frame, results, saves, on_begin, on_frame)
        saves.remove()  # when the results are whole
    return summary


def _track(
    session: Session,
    first_frame: int,
    results: Results,
    saves: SavedSession,
    on_begin: Callable[[int | None], None],
    on_frame: Callable[[], None],
) -> Summary:
    """Processes and writes the frames of a session that are left."""
    count = (session.position or first_frame) - first_frame
    object_ids = results.ids(count)
    next_frame = first_frame if session.position is None else session.next_frame
    length = session.frames.length
    on_begin(0 if next_frame is None else None if length is None else length - next_frame)
    processed = 0

    def after_frame() -> None:
        nonlocal processed
        processed += 1
        saves.save_if_due(session)
        on_frame()

    for frame in session.propagate(after_frame=after_frame):
        results.write(frame.index - first_frame, frame.pixels, _objects(frame))
        saves.confirm_frame()
        object_ids |= set(frame.ids.tolist())
        count += 1
    return Summary(count, processed, tuple(sorted(object_ids)))


def _resumed(model: Sam3, video: Path, saved: Path) -> Session | None:
    """Returns the session of an earlier run; None if there is no usable one."""
    if not saved.is_file():
        return None
    try:
        return model.resume_session(saved, video)
    except ModelError:
        return None


def _objects(frame: TrackedFrame) -> Objects:
    height, width = frame.pixels.shape[:2]
    return Objects(
        runs=tuple(map(run_lengths, frame.masks)),
        boxes=frame.boxes,
        scores=frame.scores,
        categories=tuple(text or EXAMPLE for text in frame.texts),
        size=(width, height),
        ids=tuple(frame.ids.tolist()),
    )


def _question(model: Sam3, job: Job) -> dict[str, object]:
    """Returns all inputs of the results."""
    inputs = {name: value for name, value in asdict(job).items() if name not in ("out", "video", "has_overlay")}
    video = job.video.resolve()
    stamps = [_stamp(path) for path in (frame_files(video) if video.is_dir() else [video])]
    files = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    return {
        "model": model_digest(model.manifest),
        "video": [str(video), files],
        "asked": json.loads(json.dumps(inputs)),
    }


def _stamp(path: Path) -> tuple[str, int, int] | tuple[str]:
    """Returns the facts identifying a file; for a missing one its name alone, because reading it raises the error."""
    try:
        status = path.stat()
    except OSError:
        return (path.name,)
    return path.name, status.st_size, status.st_mtime_ns
