"""The files of a tracked video, which grow frame by frame, stay valid however the run ends, and are continued.

A frame is done when the journal has its line (`harness.segment.journal`), which is written last. A run that was
interrupted or killed begins again with the first frame that is not done; the video of a run that is given up stays.
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
from harness.files import append_bytes, make_folder, remove_unfinished, write_bytes
from harness.segment.journal import JOURNAL, Journal, entries_of
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
        done: How many frames are done, from the first on; earlier runs count.
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
            HarnessError: The folder cannot be written.
            Sam3Error: PyAV is needed and not installed.
        """
        self._out, self._video = out, video
        self._overlay: VideoWriter | None = None
        self._has_overlay = has_overlay
        asked = question | {"overlay": encoder_version(out / OVERLAY) if has_overlay else None}
        make_folder(out / MASKS)
        for path in (out / ANNOTATIONS, out / JOURNAL, out / OVERLAY, out / TRACKS, out / MASKS / "*"):
            remove_unfinished(path)
        done = sum(1 for _ in _contiguous(entries_of(out, asked)))
        self.done = min(done, frames_in(out / OVERLAY)) if done and has_overlay else done
        self._journal = Journal(out, asked, _first(self.done))
        self._begin_table()
        self._remove_other_masks()

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
        if self._has_overlay:
            self._overlay_of(tracked.objects.size).write(_drawn(picture, tracked))
        write_bytes(self._out / MASKS / f"{index:05}.png", numbered_png(tracked))
        append_bytes(self._out / TRACKS, table.rows(index, annotations).encode())
        self._journal.add({"frame": index, "size": tracked.objects.size, "annotations": annotations})
        self.done += 1

    def ids(self, count: int) -> set[int]:
        """The ids of the objects in the first frames that are done."""
        entries = (entry for entry in self._journal if entry["frame"] < count)
        return {each["track_id"] for entry in entries for each in entry["annotations"]}

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
        write_data_set(
            self._out / ANNOTATIONS, self._video.name, self._video.file_name, self._video.categories, self._frames
        )
        if is_whole:
            if self._has_overlay and self.done:
                finish_video(self._out / OVERLAY)
            self._journal.remove()

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

    def _overlay_of(self, size: tuple[int, int]) -> VideoWriter:
        if self._overlay is None:
            self._overlay = VideoWriter(self._out / OVERLAY, size, self._video.rate or USUAL_RATE, self.done)
        return self._overlay

    def _frames(self) -> Iterator[AnnotatedFrame]:
        for entry in self._journal:
            width, height = entry["size"]
            yield AnnotatedFrame(entry["frame"], (width, height), entry["annotations"])

    def _begin_table(self) -> None:
        """Writes the rows of the frames that are done."""
        write_bytes(self._out / TRACKS, table.HEADER.encode())
        for frame in self._frames():
            append_bytes(self._out / TRACKS, table.rows(frame.index, frame.annotations).encode())

    def _remove_other_masks(self) -> None:
        """Removes the masks that another run has left of frames that are not done."""
        for path in (self._out / MASKS).iterdir():
            if (match := _MASK_FILE.fullmatch(path.name)) and int(match[1]) >= self.done:
                path.unlink()


def _first(count: int) -> Callable[[dict[str, Any]], bool]:
    """Whether an entry is that of one of the first frames."""
    return lambda entry: entry.get("frame", count) < count


def _contiguous(entries: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries as long as they are those of the first frames, in their order."""
    for index, entry in enumerate(entries):
        if entry.get("frame") != index:
            return
        yield entry


def _drawn(picture: npt.NDArray[np.uint8], tracked: TrackedObjects) -> npt.NDArray[np.uint8]:
    return np.asarray(draw(picture, tracked.objects, ids=tracked.ids))
