"""Reads the frames of a video by number: forwards one after another, backwards in chunks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.video.frames import Frames

Pixels = npt.NDArray[np.uint8]

CHUNK = 32
"""Frames that are kept when a passed frame is read, because a video file is then decoded from its beginning."""


class FrameReader:
    """Reads the frames of a video. Forwards it keeps one frame, backwards up to 32."""

    def __init__(self, frames: Frames) -> None:
        """Stores the frames; reads nothing yet."""
        self._frames = frames
        self._reading: Iterator[Pixels] | None = None
        self._position = 0
        self._is_broken = False
        self._chunk: dict[int, Pixels] = {}

    def frame(self, index: int) -> Pixels | None:
        """Returns a frame, uint8 [h, w, 3]; None if the video ends before it.

        Raises:
            Sam3Error: The frame cannot be read, or it was passed and the video is a stream.
        """
        if index in self._chunk:
            return self._chunk[index]
        first = index
        if index < self._position:
            if self._frames.is_stream:
                raise Sam3Error(
                    f"Frame {index} of {self._frames.name} is gone, for it is read only once; give a file, a folder or "
                    "a list of frames."
                )
            self._reading, self._position = None, 0
            first = index - CHUNK + 1
        if self._is_broken:
            raise Sam3Error(
                f"Reading {self._frames.name} stopped at frame {self._position}, and it is read only once; start a new "
                "session with what is left of it."
            )
        if self._reading is None:
            self._reading = iter(self._frames)
        chunk: dict[int, Pixels] = {}
        while self._position <= index:
            try:
                pixels = next(self._reading, None)
            except BaseException:
                # A generator that raised yields nothing more, which would look like the end of the video.
                if self._frames.is_stream:
                    self._is_broken = True
                else:
                    self._reading, self._position = None, 0
                raise
            if pixels is None:
                return None
            if self._position >= first:
                chunk[self._position] = pixels
            self._position += 1
        self._chunk = chunk
        return chunk[index]
