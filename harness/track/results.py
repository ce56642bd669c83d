"""The files of a tracked video, which grow frame by frame, stay valid however the run ends, and are continued.

A frame is done when the journal has its line (`harness.segment.journal`), which is written last. A run that was
interrupted or killed begins again with the first frame that is not done; the video of a run that is given up stays. Of
frames whose mask or overlay alone is missing, or whose overlay another encoder wrote, that alone is written anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from harness.core.errors import HarnessError
from harness.files import append_bytes, make_folder, write_bytes, write_file
from harness.segment.journal import Journal, entries_of
from harness.segment.overlay import draw
from harness.track import table
from harness.track.coco import AnnotatedFrame, track_annotations, write_data_set
from harness.track.masks import numbered_png
from harness.track.objects import TrackedObjects
from harness.track.video import VideoWriter, encoder_version, finish_video, frames_in

ANNOTATIONS, MASKS, OVERLAY, TRACKS = "annotations.json", "masks", "overlay.mp4", "tracks.csv"
"""Names in the folder of the results."""
USUAL_RATE = Fraction(25)
"""Frames per second of the overlay where the source states none."""

_MASK_FILE = re.compile(r"(\d{5,})\.png")


@dataclass(frozen=True)
class VideoDescription:
    """What the results say of the video.

    Attributes:
        name: Of the video in the data set.
        categories: All names that objects may have.
        rate: Frames per second; None where the source states none.
        file_names: File of each frame, where it has one.
    """

    name: str
    categories: Sequence[str]
    rate: Fraction | None = None
    file_names: Sequence[str] | None = None

    def file_name(self, index: int) -> str:
        """What the data set calls a frame: its file, or the video's name and the number of the frame."""
        return f"{self.name}/{index:05}" if self.file_names is None else self.file_names[index]


class Results:
    """The folder of results of one video: `overlay.mp4`, `masks/00000.png` …, `annotations.json` and `tracks.csv`.

    It is a context: `annotations.json` is written when it ends, also by an exception or by Ctrl-C.

    Attributes:
        done: How many frames are done, overlay included, from the first on; earlier runs count.
        is_whole: Whether an earlier run has done all: then nothing is written.
    """

    def __init__(
        self, out: Path, video: VideoDescription, question: dict[str, Any], *, has_overlay: bool = True
    ) -> None:
        """Takes up what an earlier run that was asked the same has done, or begins anew.

        Args:
            out: The folder; it is made.
            video: What the results say of the video.
            question: All that the results depend on: the model, the video, the prompts; JSON.
            has_overlay: Whether `overlay.mp4` is written, which needs PyAV.

        Raises:
            HarnessError: The folder cannot be written, or has files of these names that no earlier run wrote.
            Sam3Error: PyAV is needed and not installed.
        """
        self._out, self._video = out, video
        self._overlay: VideoWriter | None = None
        self._encoder = encoder_version(out / OVERLAY) if has_overlay else None
        make_folder(out)
        self._kept = sum(1 for _ in _contiguous(entries_of(out, question)))
        self._journal = Journal(out, question, _results_there(out), _first(self._kept))
        make_folder(out / MASKS)
        self.done = next((frame for frame in range(self._kept) if not self._mask(frame).is_file()), self._kept)
        if has_overlay:
            self.done = min(self.done, self._frames_in_overlay())
        self.is_whole = self._journal.is_whole and self.done == self._kept and self._has_lists()
        if not self.is_whole:
            self._remove_others()
            self._journal.list_files(out / name for name in (ANNOTATIONS, OVERLAY, TRACKS))
            self._write_table()

    def write(self, index: int, picture: npt.NDArray[np.uint8], tracked: TrackedObjects) -> None:
        """Writes a frame; one that is done already is left as it is.

        Args:
            index: Its place in the video; frames come one after another.
            picture: uint8 [h, w, 3].
            tracked: The objects that are seen in it.

        Raises:
            HarnessError: A file cannot be written; what was there before still is.
        """
        if index < self.done:
            return
        if index > self.done:
            raise ValueError(f"frame {index} comes before frame {self.done}")
        annotations = track_annotations(tracked)
        if self._encoder is not None:
            self._overlay_of(tracked.objects.size, self._encoder).write(_drawn(picture, tracked))
        mask = self._mask(index)
        if index >= self._kept or not mask.is_file():
            self._journal.list_files([mask])
            write_bytes(mask, numbered_png(tracked))
        if index >= self._kept:
            append_bytes(self._out / TRACKS, table.rows(index, annotations).encode())
            self._journal.add({"frame": index, "size": tracked.objects.size, "annotations": annotations})
        self.done += 1

    def ids(self, count: int) -> set[int]:
        """The ids of the objects in the first frames that are done."""
        frames = (frame for frame in self._frames() if frame.index < count)
        return {each["track_id"] for frame in frames for each in frame.annotations}

    def close(self, *, is_whole: bool) -> None:
        """Ends the files.

        Args:
            is_whole: Whether the video is done: nothing will be continued.

        Raises:
            HarnessError: A file cannot be written; what was there before still is.
        """
        if self._overlay is not None:
            overlay, self._overlay = self._overlay, None
            overlay.close()
        if self.is_whole:
            return
        write_data_set(
            self._out / ANNOTATIONS, self._video.name, self._video.file_name, self._video.categories, self._frames
        )
        if is_whole:
            if self._encoder is not None and self.done:
                finish_video(self._out / OVERLAY)
            self._journal.end()

    def __enter__(self) -> Self:
        """Gives itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the files; what else fails after an error is not told."""
        if error is None:
            self.close(is_whole=True)
            return
        with suppress(HarnessError):
            self.close(is_whole=False)

    def _mask(self, index: int) -> Path:
        return self._out / MASKS / f"{index:05}.png"

    def _overlay_of(self, size: tuple[int, int], encoder: str) -> VideoWriter:
        if self._overlay is None:
            self._overlay = VideoWriter(self._out / OVERLAY, size, self._video.rate or USUAL_RATE, self.done)
            self._journal.add({"encoder": encoder})
        return self._overlay

    def _frames_in_overlay(self) -> int:
        """How many frames the overlay has; none that another encoder wrote."""
        encoders = [entry["encoder"] for entry in self._journal if "encoder" in entry]
        return frames_in(self._out / OVERLAY) if encoders[-1:] == [self._encoder] else 0

    def _frames(self) -> Iterator[AnnotatedFrame]:
        for entry in self._journal:
            if "frame" in entry:
                width, height = entry["size"]
                yield AnnotatedFrame(entry["frame"], (width, height), entry["annotations"])

    def _has_lists(self) -> bool:
        return all((self._out / name).is_file() for name in (ANNOTATIONS, TRACKS))

    def _write_table(self) -> None:
        """Writes the rows of the frames that are done."""
        with write_file(self._out / TRACKS) as temporary, temporary.open("wb") as file:
            file.write(table.HEADER.encode())
            for frame in self._frames():
                file.write(table.rows(frame.index, frame.annotations).encode())

    def _remove_others(self) -> None:
        """Removes what another run has left of frames that are not done, and all that tells of another question."""
        for path in _results_there(self._out):
            number = _MASK_FILE.fullmatch(path.name)
            if int(number[1]) >= self._kept if number else not self._kept:
                self._journal.remove_listed(path)


def _results_there(out: Path) -> Iterator[Path]:
    """The files of a folder that have names of results."""
    for name in (ANNOTATIONS, OVERLAY, TRACKS):
        if (out / name).exists():
            yield out / name
    if (out / MASKS).is_dir():
        yield from [path for path in (out / MASKS).iterdir() if _MASK_FILE.fullmatch(path.name)]


def _first(count: int) -> Callable[[dict[str, Any]], bool]:
    """Whether an entry is not that of a frame after the first ones."""
    return lambda entry: entry.get("frame", -1) < count


def _contiguous(entries: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries of frames as long as they are those of the first ones, in their order."""
    frames = (entry for entry in entries if "frame" in entry)
    for index, entry in enumerate(frames):
        if entry["frame"] != index:
            return
        yield entry


def _drawn(picture: npt.NDArray[np.uint8], tracked: TrackedObjects) -> npt.NDArray[np.uint8]:
    return np.asarray(draw(picture, tracked.objects, ids=tracked.ids))
