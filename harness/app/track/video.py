"""Writes a video that can be played however the writing ends, and that can be continued.

During writing, every frame is its own fragment of the MP4 file (`movflags=frag_every_frame`), so that a player shows
the frames that are there. A frame is on the disk when the next one is written. `finish_video` converts the file to an
ordinary MP4 file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.errors import HarnessError
from harness.core.files import explain_write_errors, write_file
from harness.runtime.arrays import Pixels
from harness.runtime.errors import reason
from harness.runtime.sam3.video.frames import pyav

if TYPE_CHECKING:
    from av.packet import Packet

_FRAGMENTS = {"movflags": "frag_every_frame+empty_moov+default_base_moof"}
_ENCODERS = {
    # Frames are output at once and refer to earlier frames alone, so that a video can be cut anywhere.
    "libx264": {"preset": "veryfast", "crf": "20", "tune": "zerolatency"},
    "mpeg4": {"qmin": "2", "qmax": "5"},
}
"""Encoders in the order of preference, with their options."""
_BT709 = 1
_LIMITED_RANGE = 1


class VideoWriter:
    """Writes an MP4 file that grows frame by frame; an existing file is replaced or continued."""

    def __init__(self, path: Path, size: tuple[int, int], rate: Fraction, frame_count: int = 0) -> None:
        """Starts the file.

        Args:
            path: The file; its folder must exist.
            size: Width and height of the frames. An odd one becomes even by repeating the last column or row, which the
                format of the pixels (4:2:0) needs.
            rate: Frames per second.
            frame_count: Number of frames of the existing file that stay; this class wrote them, with the same size and
                rate.

        Raises:
            ModelError: PyAV is not installed.
            HarnessError: The file cannot be written, or the encoder takes no frames of this size.
        """
        av = pyav(path)
        self._path, self._size = path, size
        self._frame_type, self._errors = av.VideoFrame, av.FFmpegError
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._is_open = True
        self._interval = 1 / rate
        self._padding = [(0, size[1] % 2), (0, size[0] % 2), (0, 0)]
        self._count = frame_count
        # The file gets its name when the kept frames are in it, and grows afterwards.
        with write_file(path) as temporary, self._encoding():
            self._container = av.open(str(temporary), "w", format="mp4", container_options=_FRAGMENTS)
            self._container.flags |= av.container.Flags.flush_packets.value
            name = encoder()
            self._stream = self._container.add_stream(
                name,
                rate,
                options=_ENCODERS[name],
                width=size[0] + size[0] % 2,
                height=size[1] + size[1] % 2,
                time_base=self._interval,
            )
            context = self._stream.codec_context
            context.colorspace, context.color_range = _BT709, _LIMITED_RANGE
            context.color_primaries, context.color_trc = _BT709, _BT709
            self._container.start_encoding()
            for packet in _for_muxing(islice(_whole_packets(path), frame_count)):
                packet.stream = self._stream
                self._container.mux(packet)

    def write(self, pixels: Pixels) -> None:
        """Adds a frame.

        Args:
            pixels: uint8 [h, w, 3].

        Raises:
            HarnessError: The file cannot be written, or the frame not encoded.
        """
        frame = self._frame_type.from_ndarray(np.pad(pixels, self._padding, mode="edge"), format="rgb24")
        frame = self._reformatter.reformat(frame, format="yuv420p", dst_colorspace="ITU709")
        frame.pts, frame.time_base = self._count, self._interval
        with self._whole_or_nothing():
            self._container.mux(self._stream.encode(frame))
        self._count += 1

    def close(self) -> None:
        """Ends the file, which `VideoWriter` can continue; it has already ended if a frame could not be written.

        Raises:
            HarnessError: The last frame cannot be written.
        """
        if self._is_open:
            with self._whole_or_nothing():
                self._container.mux(self._stream.encode(None))
                self._container.close()
            self._is_open = False

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        """Turns an error of FFmpeg, unless it is the system's, into the sentence that the user reads."""
        try:
            yield
        except OSError:
            raise
        except self._errors as error:
            width, height = self._size
            raise HarnessError(
                f"{self._path} cannot be made of frames of {width} x {height} pixels ({reason(error)}); scale the "
                "video down, or write none with --no-overlay."
            ) from error

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """Truncates the file after the last complete fragment if writing fails."""
        length = self._path.stat().st_size
        try:
            with explain_write_errors(self._path), self._encoding():
                yield
        except BaseException:
            self._is_open = False
            with suppress(self._errors):
                self._container.close()
            with suppress(OSError):
                os.truncate(self._path, length)
            raise


def encoder() -> str:
    """Returns the name of the encoder: H.264 where PyAV was built with it."""
    from av.codec import codecs_available

    return next(name for name in _ENCODERS if name in codecs_available)


def encoder_version(path: Path) -> str:
    """Returns the name and version of the encoder; another version does not continue a file.

    Raises:
        ModelError: PyAV is not installed.
    """
    return f"PyAV {pyav(path).__version__}, {encoder()}"


def frames_in(path: Path) -> int:
    """Counts the complete frames of a video that `VideoWriter` wrote; 0 if there is no such file."""
    return sum(1 for _ in _whole_packets(path))


def finish_video(path: Path) -> None:
    """Converts a file of `VideoWriter` to an ordinary MP4 file with one index, which comes first.

    Raises:
        HarnessError: The file cannot be written; it is unchanged.
    """
    av = pyav(path)
    with write_file(path) as temporary, av.open(str(path)) as source:
        options = {"movflags": "faststart"}
        with av.open(str(temporary), "w", format="mp4", container_options=options) as target:
            stream = target.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    target.mux(packet)


def _for_muxing(packets: Iterable[Packet[Any]]) -> Iterator[Packet[Any]]:
    """Converts packets of an MP4 file to the form of an encoder's, which the muxer expects."""
    from av.bitstream import BitStreamFilterContext

    to_start_codes = None
    for packet in packets:
        if packet.stream.codec_context.name != "h264":
            yield packet
            continue
        to_start_codes = to_start_codes or BitStreamFilterContext("h264_mp4toannexb", packet.stream)
        yield from to_start_codes.filter(packet)


def _whole_packets(path: Path) -> Iterator[Packet[Any]]:
    """Yields the encoded frames of a file until it ends or is broken."""
    av = pyav(path)
    try:
        with av.open(str(path)) as container:
            for packet in container.demux(video=0):
                if packet.is_corrupt:
                    return
                if packet.size:
                    yield packet
    except (av.FFmpegError, IndexError):
        return
