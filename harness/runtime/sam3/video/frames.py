"""Opens videos of any kind and reads their frames, one after another, upright, 8-bit RGB, all of one size.

A video is a file, a folder of images, a list of images or arrays, or an iterator of frames that may be endless. One
frame is in memory at a time; `FrameReader` and the hotstart buffer keep others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import ModelError
from harness.runtime.sam3.images import load_image, to_pixels
from harness.runtime.sam3.video.video_files import (
    ANIMATION_SUFFIXES,
    animation_timing,
    file_timing,
    read_animation,
    read_file,
)

Pixels = npt.NDArray[np.uint8]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tiff", ".webp")
"""Files of a folder that are frames (`IMAGE_EXTS`, `sam3/model/io_utils.py:25`)."""

CHUNK = 32
"""Frames that are kept when a passed frame is read, because a video file is then decoded from its beginning."""


@dataclass(frozen=True, eq=False)
class Frames:
    """The frames of a video; each iteration reads them from the first on, but a stream is read once.

    Attributes:
        name: Name of the video in sentences.
        read: Starts reading.
        length: Number of frames that the source states before they are read; None for a stream.
        rate: Frames per second, where the source states it.
        names: File of each frame, where frames are files.
        is_stream: Whether the frames can be read only once.
    """

    name: str
    read: Callable[[], Generator[Pixels, None, None]]
    length: int | None = None
    rate: Fraction | None = None
    names: tuple[str, ...] | None = None
    is_stream: bool = False

    def __iter__(self) -> Iterator[Pixels]:
        """Yields each frame, uint8 [h, w, 3].

        Raises:
            ModelError: There is no frame, a frame cannot be read, or its size differs from that of earlier frames.
                Earlier frames were yielded and can be used.
        """
        size = None
        with closing(self.read()) as frames:
            for index, pixels in enumerate(frames):
                size = size or pixels.shape
                if pixels.shape != size:
                    raise ModelError(
                        f"Frame {index} of {self.name} has {_size_text(pixels.shape)} pixels, and those before it have "
                        f"{_size_text(size)}; cut the video where its size changes."
                    )
                yield pixels
        if size is None:
            raise ModelError(f"{self.name} has no frames; give a video that has.")


def open_frames(source: Any) -> Frames:
    """Opens a video; frames are read when they are needed.

    Args:
        source: A video file or an animation; a folder of images, which are its frames in the order of upstream; one
            image; a list of files, images of Pillow and arrays uint8 [h, w, 3]; an array uint8 [t, h, w, 3]; or any
            iterable of such frames, which may be endless. `Frames` are returned unchanged.

    Raises:
        ModelError: The source is none of these, or cannot be opened; a list is checked frame by frame while it is read.
    """
    if isinstance(source, Frames):
        return source
    if isinstance(source, str | Path):
        return _open_path(Path(source))
    if isinstance(source, np.ndarray) and source.ndim != 4:
        raise ModelError(f"The video is an array {list(source.shape)}; give uint8 [frames, height, width, 3].")
    if isinstance(source, Sequence | np.ndarray):
        return Frames("the list of frames", lambda: _read_frames(source, "the list of frames"), len(source))
    if isinstance(source, Iterable):
        return Frames("the stream", lambda: _read_frames(source, "the stream"), is_stream=True)
    raise ModelError(
        f"The video is of type {type(source).__name__}; give a file, a folder, a list or an iterator of frames."
    )


def frame_files(folder: Path) -> list[Path]:
    """Lists the frames of a folder in upstream's order: by number if all are named `<number>.<suffix>`, else by name.

    Upstream: `load_video_frames_from_image_folder`, `sam3/model/io_utils.py:158`. Hidden files are ignored, and equal
    numbers (`1.png`, `01.png`) are sorted by name; upstream includes hidden files and uses the order of the disk.

    Raises:
        ModelError: The folder cannot be read, or has no images.
    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ModelError(f"The folder {folder} cannot be read ({error.strerror}); check its permissions.") from error
    files = [path for path in entries if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")]
    if not files:
        raise ModelError(f"The folder {folder} has no images; frames are files {', '.join(IMAGE_SUFFIXES)}.")
    try:
        return sorted(files, key=lambda path: int(path.stem))
    except ValueError:
        return files


def _open_path(path: Path) -> Frames:
    """Opens the video at a path."""
    name, suffix = str(path), path.suffix.lower()
    if not path.exists():
        raise ModelError(f"{name} does not exist; give a video file or a folder of images.")
    if path.is_dir():
        return _image_files(frame_files(path), name)
    if suffix in ANIMATION_SUFFIXES and (timing := animation_timing(path)) is not None:
        return Frames(name, lambda: read_animation(path), *timing)
    if suffix in IMAGE_SUFFIXES or suffix in ANIMATION_SUFFIXES:
        return _image_files([path], name)
    return Frames(name, lambda: read_file(path), *file_timing(path))


def _image_files(files: Sequence[Path], name: str) -> Frames:
    return Frames(name, lambda: _read_frames(files, name), len(files), names=tuple(file.name for file in files))


def _read_frames(frames: Iterable[Any], name: str) -> Generator[Pixels, None, None]:
    """Yields the pixels of frames that are files, images or arrays."""
    for index, frame in enumerate(frames):
        try:
            pixels = np.array(load_image(frame)) if isinstance(frame, str | Path) else to_pixels(frame)
        except ModelError as error:
            raise ModelError(f"Frame {index} of {name} cannot be used: {error}") from error
        yield pixels


def _size_text(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[0]}"


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
            ModelError: The frame cannot be read, or it was passed and the video is a stream.
        """
        if index in self._chunk:
            return self._chunk[index]
        first = index
        if index < self._position:
            if self._frames.is_stream:
                raise ModelError(
                    f"Frame {index} of {self._frames.name} is gone, for it is read only once; give a file, a folder or "
                    "a list of frames."
                )
            self._reading, self._position = None, 0
            first = index - CHUNK + 1
        if self._is_broken:
            raise ModelError(
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
