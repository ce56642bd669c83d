"""Decodes video files by PyAV, and animated images by Pillow, one frame after another.

PyAV is an extra of the installation. The rotation that a file states is applied, more than 8 bits are reduced to 8, and
colours are converted by the matrix and the range that the file states (BT.601 in limited range by default).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import ModelError, reason
from harness.runtime.sam3.images import check_size, image_errors, open_image, to_rgb

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
    from PIL import Image

Pixels = npt.NDArray[np.uint8]

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
