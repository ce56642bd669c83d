"""The session of a run in a file, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from harness.runtime.sam3.video.session import Session

EVERY = 10.0
"""Seconds between two files: what is computed again at most after a run was stopped."""


_PREFIX = ".session-"


def session_file(out: Path, question: dict[str, Any]) -> Path:
    """The file of a run in its folder, which has a name of its own for all that the results depend on."""
    return out / f"{_PREFIX}{hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16]}.safetensors"


class SavedSession:
    """Saves a session now and then.

    A file takes the place of the one before when another frame has been written, so that the results never lack a frame
    that the session has given out: the last frame of a video may not be on the disk yet.
    """

    def __init__(self, path: Path, every: float = EVERY) -> None:
        """Takes the file, whose folder exists, and the seconds between two; what else other runs left is removed."""
        self._path, self._every = path, every
        self._new = path.with_name(f"{path.name}.new")
        for pattern in (f"{_PREFIX}*", f".{_PREFIX}*.tmp"):
            for other in path.parent.glob(pattern):
                if other != path:
                    other.unlink(missing_ok=True)
        self._when = time.monotonic()
        self._has_written = False

    def frame_is_processed(self, session: Session) -> None:
        """To be called after each frame that the session has processed.

        Raises:
            Sam3Error: The file cannot be written.
        """
        if time.monotonic() - self._when >= self._every:
            session.save(self._new if self._has_written else self._path)
            self._when = time.monotonic()

    def frame_is_written(self) -> None:
        """To be called after each frame of the results."""
        self._has_written = True
        if self._new.exists():
            self._new.replace(self._path)

    def remove(self) -> None:
        """Removes the files: the video is done."""
        self._new.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
