"""Opens videos of any kind and reads their frames, one after another, upright, 8-bit RGB, all of one size.

A video is a file, a folder of images, a list of images or arrays, or an iterator of frames that may be endless. One
frame is in memory at a time; `FrameReader` and the hotstart buffer keep others.

Pillow decodes animated images, and PyAV, an extra of the installation, video files. The rotation that a file states is
applied, more than 8 bits are reduced to 8, and colours are converted by the matrix and the range that the file states
(BT.601 in limited range by default).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Pixels
from harness.runtime.errors import ModelError, reason
from harness.runtime.sam3.images import check_size, image_errors, load_image, open_image, to_pixels, to_rgb

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL import Image


_READABLE = (
    *("mov", "matroska", "avi", "mpegts", "mpeg", "mpegvideo", "flv", "asf", "ogg", "mxf", "gif", "ivf", "nut", "rm"),
    *("h264", "hevc", "av1", "obu", "m4v", "mjpeg", "dv", "yuv4mpegpipe", "apng", "wav", "mp3", "flac", "aac"),
)
"""FFmpeg's names of the formats that are read, which exclude lists of other files or addresses."""

_CLOCK = re.compile(r"(\d+):(\d+):(\d+(?:\.\d+)?)")

ANIMATION_SUFFIXES = (".gif", ".png", ".apng", ".webp")
_ADVICE = "cut the animation there, or save it anew"


def pyav(path: Path) -> Any:
    """Imports PyAV.

    Args:
        path: The file that needs it.

    Raises:
        ModelError: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ModelError(
            f"{path} is a video file, and PyAV, which reads and writes them, is not installed: "
            "pip install 'sam3-tvm[video]'; a folder of images needs nothing more."
        ) from error
    return av


def file_timing(path: Path) -> tuple[int | None, Fraction | None]:
    """Returns the number of frames that a video file states, and its frames per second.

    Returns:
        None where the file does not state a value.

    Raises:
        ModelError: The file cannot be read, or has no video.
    """
    with _open_stream(path) as (_, stream):
        return _stated_length(stream), stream.average_rate or stream.guessed_rate


def read_file(path: Path) -> Generator[Pixels, None, None]:
    """Yields each frame of a video file, uint8 [h, w, 3], upright, in its own memory.

    Raises:
        ModelError: The file cannot be read, a frame is damaged or too large, or the file ends before the time that it
            states.
    """
    av = pyav(path)
    with _open_stream(path) as (container, stream):
        # One reformatter for all frames, because each one keeps megabytes of state.
        reformatter = av.video.reformatter.VideoReformatter()
        count, end, matrix = 0, Fraction(0), None
        try:
            for frame in _decode(container, stream, av):
                if frame.is_corrupt:
                    raise av.InvalidDataError(0, "its data are damaged")
                if frame.pts is not None and stream.time_base:
                    end = (frame.pts + (frame.duration or 0)) * stream.time_base
                check_size(frame.width, frame.height, f"Frame {count} of {path}")
                if count == 0:
                    matrix = _display_matrix(frame)
                pixels = reformatter.reformat(frame, format="rgb24").to_ndarray()
                # A copy, because the array is a view of FFmpeg's memory, with gaps between rows.
                yield np.array(upright(pixels, matrix), order="C")
                count += 1
        except av.FFmpegError as error:
            raise _broken_frame(path, count, reason(error)) from error
        except (ModelError, MemoryError):
            raise
        except Exception as error:
            raise _broken_frame(path, count, reason(error)) from error
        stated, rate = _stated_end(stream), stream.average_rate
    if stated is not None and rate and end < stated - 2 / rate:
        raise ModelError(
            f"{path} ends after {count} frames and {float(end):.2f} seconds, and states that it lasts "
            f"{float(stated):.2f} seconds; convert or copy it anew."
        )


def upright(pixels: Pixels, matrix: npt.NDArray[np.int32] | None) -> Pixels:
    """Turns and mirrors a frame by the display matrix of its file.

    Args:
        pixels: uint8 [h, w, 3].
        matrix: int32 [3, 3]: the column and row (x, y) of a pixel, times the matrix, are the place where the pixel is
            shown (FFmpeg's `libavutil/display.h`). Angles are rounded to quarter turns. None for a frame that is
            upright.

    Returns:
        uint8 [h, w, 3], or [w, h, 3] for a quarter turn; a view of the frame.
    """
    if matrix is None:
        return pixels
    (across_x, across_y), (down_x, down_y) = matrix[:2, :2].tolist()
    if abs(across_x) + abs(down_y) < abs(across_y) + abs(down_x):
        pixels, across_x, down_y = pixels.swapaxes(0, 1), down_x, across_y
    pixels = pixels[:, ::-1] if across_x < 0 else pixels
    return pixels[::-1] if down_y < 0 else pixels


@contextmanager
def _open_stream(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens a file; yields its container and its best video stream."""
    av = pyav(path)
    try:
        options = {"format_whitelist": ",".join(_READABLE)}
        container = av.open(str(path), metadata_errors="replace", options=options)
    except PermissionError as error:
        raise ModelError(f"The video {path} may not be read; check its permissions.") from error
    except av.FFmpegError as error:
        raise ModelError(
            f"The file {path} is not a video that PyAV can read ({reason(error)}); use MP4, MOV, MKV or WebM."
        ) from error
    try:
        with container:
            picture = av.stream.Disposition.attached_pic
            streams = [stream for stream in container.streams.video if not stream.disposition & picture]
            if not streams:
                raise ModelError(f"The file {path} has no video; give one that has.")
            if streams[0].codec_context is None:
                raise ModelError(f"The video {path} is in a format that PyAV has no decoder for; convert it to H.264.")
            check_size(streams[0].width, streams[0].height, f"The video {path}")
            yield container, streams[0]
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"The video {path} is damaged ({reason(error)}); convert or copy it anew.") from error


def _decode(container: InputContainer, stream: VideoStream, av: Any) -> Generator[VideoFrame, None, None]:
    """Decodes a stream; where its data end in the middle, the frames in the decoder come before the error.

    Where the decoder fails they do not come, because they may refer to frames that it could not decode.
    """
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
            # Where two MPEG-TS files were joined, the last packet of the first is marked, although it is complete.
            if packet is not None and packet.is_corrupt and "mpegts" not in _formats(stream):
                raise av.InvalidDataError(0, "its data are incomplete")
        except av.FFmpegError:
            with suppress(av.FFmpegError):
                yield from stream.decode(None)
            raise
        if packet is None:
            return
        yield from packet.decode()


def _stated_length(stream: VideoStream) -> int | None:
    """Returns the number of frames; None where the header does not state it, as that of an MP4 file in fragments.

    An MP4 file may have more frames than its edit list shows; the index marks them.
    """
    if "mp4" in _formats(stream) and stream.frames:
        return sum(not entry.is_discard for entry in stream.index_entries) or None
    return stream.frames or None


def _stated_end(stream: VideoStream) -> Fraction | None:
    """Returns the end of the last frame, in seconds, as the header states it; other containers have no such field."""
    if clock := _CLOCK.fullmatch(stream.metadata.get("DURATION", "")):  # Matroska and WebM
        return Fraction(clock[3]) + 60 * (int(clock[2]) + 60 * int(clock[1]))
    formats = _formats(stream)
    if "avi" in formats and stream.frames and stream.average_rate:
        return stream.frames / stream.average_rate
    if "mp4" in formats and stream.duration and stream.time_base:
        return stream.duration * stream.time_base
    return None


def _formats(stream: VideoStream) -> set[str]:
    """Returns the names of a container's format, such as `mov`, `mp4` and `m4a`."""
    return set(stream.container.format.name.split(","))


def _display_matrix(frame: VideoFrame) -> npt.NDArray[np.int32] | None:
    """Returns the display matrix of a file, which every frame has.

    A frame whose side data were read stays in memory until cyclic garbage is collected, so it is read from one frame
    alone.
    """
    data: Any = frame.side_data.get("DISPLAYMATRIX")
    return None if data is None else np.frombuffer(bytes(data), np.int32).reshape(3, 3)


def _broken_frame(path: Path, index: int, why: str) -> ModelError:
    return ModelError(
        f"Frame {index} of {path} cannot be decoded ({why}); cut the video there, or convert or copy it anew."
    )


def animation_timing(path: Path) -> tuple[int, Fraction | None] | None:
    """Returns the number of frames of an animation and its frames per second, by the duration of the first frame.

    Returns:
        None if the file is no animation, or cannot be read as an image.
    """
    try:
        with image_errors(str(path)), open_image(path) as file:
            if not getattr(file, "is_animated", False):
                return None
            milliseconds = file.info.get("duration", 0)
            return _count(file), Fraction(1000) / Fraction(milliseconds) if milliseconds > 0 else None
    except ModelError:
        return None


def read_animation(path: Path) -> Generator[npt.NDArray[np.uint8], None, None]:
    """Yields each frame of an animation, uint8 [h, w, 3], drawn over the frames before it as the file specifies.

    Raises:
        ModelError: A frame cannot be read, or is too large.
    """
    with ExitStack() as stack:
        with image_errors(str(path), _ADVICE):
            file = stack.enter_context(open_image(path))
            count = _count(file)
        for index in range(count):
            with image_errors(f"Frame {index} of {path}", _ADVICE):
                file.seek(index)
                file.load()
                pixels = np.array(to_rgb(file))
            yield pixels


def _count(file: Image.Image) -> int:
    count: int = getattr(file, "n_frames", 1)
    return count


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
