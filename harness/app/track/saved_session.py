"""Saves the session of a run to a file, so that a run that was stopped can be continued."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from harness.runtime.sam3.video.session import Session

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
