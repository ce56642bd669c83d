"""Writes the files of a tracked video, which grow frame by frame, stay valid however the run ends, and are continued.

A frame is done when the journal has its line (`harness.app.results.journal`), which is written last. A run that was
interrupted or killed continues with the first frame that is not done; the video of an abandoned run stays. If only the
mask or the overlay of a frame is missing, or another encoder wrote the overlay, only that file is written anew.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict

import numpy as np

from harness.app.results.coco import AnnotatedImage, TrackAnnotation, coco_annotations, write_video_data_set
from harness.app.results.journal import Journal, entries_of, existing_files, has_form
from harness.app.results.objects import Objects
from harness.app.results.overlay import draw, numbered_png
from harness.app.track.video import VideoWriter, encoder_version, finish_video, frames_in
from harness.core.errors import HarnessError
from harness.core.files import append_bytes, make_folder, write_bytes, write_file
from harness.runtime.arrays import Pixels

ANNOTATIONS, MASKS, OVERLAY, TRACKS = "annotations.json", "masks", "overlay.mp4", "tracks.csv"
"""File names in the folder of the results."""
DEFAULT_RATE = Fraction(25)
"""Frames per second of the overlay where the source states no rate."""

_COLUMNS = ("frame", "track", "category", "score", "x", "y", "width", "height", "area")
"""The columns of the table, a CSV file as RFC 4180 has it, with one row for each object of each frame."""
_MASK_FILE = re.compile(r"(\d{5,})\.png")


@dataclass(frozen=True)
class VideoDescription:
    """The facts about a video in the results.

    Attributes:
        name: Name of the video in the data set.
        categories: All categories of objects.
        rate: Frames per second; None where the source states no rate.
        file_names: File of each frame, where frames are files.
    """

    name: str
    categories: Sequence[str]
    rate: Fraction | None = None
    file_names: Sequence[str] | None = None

    def file_name(self, index: int) -> str:
        """Returns the name of a frame in the data set: its file, or the video's name and the frame's number."""
        return f"{self.name}/{index:05}" if self.file_names is None else self.file_names[index]


class Results(AbstractContextManager["Results"]):
    """The folder of results of one video: `overlay.mp4`, `masks/00000.png` …, `annotations.json` and `tracks.csv`.

    It is a context manager, which writes `annotations.json` at its end, also after an exception or Ctrl-C.

    Attributes:
        done: Number of finished frames, overlay included, from the first on; those of earlier runs count.
        is_whole: Whether an earlier run has finished; then nothing is written.
    """

    def __init__(
        self, out: Path, video: VideoDescription, question: dict[str, Any], *, has_overlay: bool = True
    ) -> None:
        """Continues the results of an earlier run with the same question, or starts new ones.

        Args:
            out: The folder; it is made.
            video: The facts about the video.
            question: All inputs of the results: the model, the video, the prompts; JSON.
            has_overlay: Whether `overlay.mp4` is written, which needs PyAV.

        Raises:
            HarnessError: The folder cannot be written, or has files of these names that no earlier run wrote.
            ModelError: PyAV is needed and not installed.
        """
        self._out, self._video = out, video
        self._overlay: VideoWriter | None = None
        self._encoder = encoder_version(out / OVERLAY) if has_overlay else None
        make_folder(out)
        self._journal_length = sum(1 for _ in _contiguous(entries_of(out, question), video.categories))
        self._journal = Journal(out, question, self._existing_files(), _is_among_first(self._journal_length))
        make_folder(out / MASKS)
        self.done = next(
            (frame for frame in range(self._journal_length) if not self._mask(frame).is_file()), self._journal_length
        )
        if has_overlay:
            self.done = min(self.done, self._frames_in_overlay())
        has_lists = all((out / name).is_file() for name in (ANNOTATIONS, TRACKS))
        self.is_whole = self._journal.is_whole and self.done == self._journal_length and has_lists
        if not self.is_whole:
            self._remove_stale()
            self._journal.list_files(out / name for name in (ANNOTATIONS, OVERLAY, TRACKS))
            self._write_table()

    def write(self, index: int, picture: Pixels, objects: Objects) -> None:
        """Writes a frame; a finished one is not written again.

        Args:
            index: Its index in the video; frames come one after another.
            picture: uint8 [h, w, 3].
            objects: Its visible objects, which have ids.

        Raises:
            HarnessError: A file cannot be written; an earlier file stays.
        """
        if index < self.done:
            return
        if index > self.done:
            raise ValueError(f"frame {index} comes before frame {self.done}")
        annotations = coco_annotations(objects)
        if self._encoder is not None:
            self._overlay_writer(objects.size, self._encoder).write(np.asarray(draw(picture, objects)))
        mask = self._mask(index)
        if index >= self._journal_length or not mask.is_file():
            self._journal.list_files([mask])
            write_bytes(mask, numbered_png(objects))
        if index >= self._journal_length:
            append_bytes(self._out / TRACKS, _rows(index, annotations))
            self._journal.add({"frame": index, "size": objects.size, "annotations": annotations})
        self.done += 1

    def ids(self, count: int) -> set[int]:
        """Returns the ids of the objects in the first `count` frames."""
        frames = islice(self._frames(), count)
        return {entry["track_id"] for frame in frames for entry in frame.annotations}

    def close(self, *, is_whole: bool) -> None:
        """Ends the files.

        Args:
            is_whole: Whether the video is finished, so that nothing will be continued.

        Raises:
            HarnessError: A file cannot be written; an earlier file stays.
        """
        if self._overlay is not None:
            overlay, self._overlay = self._overlay, None
            overlay.close()
        if self.is_whole:
            return
        write_video_data_set(self._out / ANNOTATIONS, self._video.name, self._frames, self._video.categories)
        if is_whole:
            if self._encoder is not None and self.done:
                finish_video(self._out / OVERLAY)
            self._journal.end()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the files; after an error, errors of ending them are suppressed."""
        if error is None:
            self.close(is_whole=True)
            return
        with suppress(HarnessError):
            self.close(is_whole=False)

    def _existing_files(self) -> Iterator[Path]:
        files = (self._out / name for name in (ANNOTATIONS, OVERLAY, TRACKS))
        return existing_files(files, [self._out / MASKS], _MASK_FILE)

    def _mask(self, index: int) -> Path:
        return self._out / MASKS / f"{index:05}.png"

    def _overlay_writer(self, size: tuple[int, int], encoder: str) -> VideoWriter:
        if self._overlay is None:
            self._overlay = VideoWriter(self._out / OVERLAY, size, self._video.rate or DEFAULT_RATE, self.done)
            self._journal.add({"encoder": encoder})
        return self._overlay

    def _frames_in_overlay(self) -> int:
        """Returns the number of frames of the overlay; 0 if another encoder wrote it."""
        encoders = [entry["encoder"] for entry in self._journal if "encoder" in entry]
        return frames_in(self._out / OVERLAY) if encoders[-1:] == [self._encoder] else 0

    def _frames(self) -> Iterator[AnnotatedImage]:
        """Yields the finished frames from the first on."""
        for entry in self._journal:
            if "frame" in entry:
                width, height = entry["size"]
                yield AnnotatedImage(self._video.file_name(entry["frame"]), (width, height), entry["annotations"])

    def _write_table(self) -> None:
        """Writes the rows of the finished frames."""
        with write_file(self._out / TRACKS) as temporary, temporary.open("wb") as file:
            file.write(_csv([_COLUMNS]))
            for index, frame in enumerate(self._frames()):
                file.write(_rows(index, frame.annotations))

    def _remove_stale(self) -> None:
        """Removes files of an earlier run: masks of frames that are not done, and all results of another question."""
        for path in self._existing_files():
            mask = _MASK_FILE.fullmatch(path.name)
            is_stale = int(mask[1]) >= self._journal_length if mask else self._journal_length == 0
            if is_stale:
                self._journal.remove_listed(path)


def _is_among_first(count: int) -> Callable[[dict[str, Any]], bool]:
    """Returns a predicate, for entries in their order, that rejects those of frames after the first `count`."""
    left = iter(range(count))
    return lambda entry: "frame" not in entry or next(left, None) is not None


class _Entry(TypedDict):
    """The form of an entry of the journal, a frame that is done."""

    frame: int
    size: tuple[int, int]
    annotations: list[TrackAnnotation]


def _contiguous(entries: Iterator[dict[str, Any]], categories: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yields the entries of frames until one is not the next frame, is damaged, or has objects of other categories."""
    frames = (entry for entry in entries if "frame" in entry)
    for index, entry in enumerate(frames):
        if entry["frame"] != index or not has_form(entry, _Entry, categories):
            return
        yield entry


def _rows(frame: int, annotations: Sequence[dict[str, Any]]) -> bytes:
    """Returns the rows of a frame in the table, boxes and areas in pixels."""
    return _csv(
        [frame, entry["track_id"], entry["category"], entry["score"], *entry["bbox"], entry["area"]]
        for entry in annotations
    )


def _csv(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()
