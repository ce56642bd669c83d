"""Writes a video as a data set in COCO's format, with the fields of TAO that link the annotations of an object.

TAO: https://github.com/TAO-Dataset/tao/blob/master/docs/file_format.md. `pycocotools.coco.COCO` loads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.app.segment.coco import (
    INFO,
    annotation_entry,
    category_entries,
    category_numbers,
    coco_annotations,
    image_entry,
)
from harness.app.track.objects import TrackedObjects
from harness.core.files import write_file

VIDEO_ID = 1
"""Id of the only video."""


@dataclass(frozen=True)
class AnnotatedFrame:
    """A finished frame with its annotations.

    Attributes:
        index: Its index in the video, from 0.
        size: Width and height in pixels.
        annotations: Entries of `track_annotations`.
    """

    index: int
    size: tuple[int, int]
    annotations: Sequence[dict[str, Any]]


def track_annotations(tracked: TrackedObjects) -> list[dict[str, Any]]:
    """Makes an entry for each object: that of `harness.app.segment.coco.coco_annotations` and its id, `track_id`."""
    entries = coco_annotations(tracked.objects)
    return [{"track_id": number} | entry for number, entry in zip(tracked.ids, entries, strict=True)]


def write_data_set(
    path: Path,
    video: str,
    file_name: Callable[[int], str],
    categories: Sequence[str],
    frames: Callable[[], Iterator[AnnotatedFrame]],
) -> None:
    """Writes the data set of a video, without holding it in memory as a whole.

    `images` has an entry for each frame, with `video_id` and `frame_index`; `tracks` has one for each object, whose id
    `annotations` have in `track_id`. All ids but those of objects start at 1.

    Args:
        path: The file.
        video: Name of the video.
        file_name: Returns the file name of the frame with an index.
        categories: All categories of the annotations.
        frames: Returns an iterator of the finished frames in order; called several times.

    Raises:
        HarnessError: The file cannot be written; an earlier file stays.
    """
    numbers = category_numbers(categories)
    tracks: dict[int, int] = {}
    (width, height), length = (0, 0), 0
    for frame in frames():
        (width, height), length = frame.size, length + 1
        tracks |= {entry["track_id"]: numbers[entry["category"]] for entry in frame.annotations}
    head = {
        "info": INFO,
        "licenses": [],
        "videos": [{"id": VIDEO_ID, "name": video, "width": width, "height": height, "length": length}],
        "categories": category_entries(numbers),
        "tracks": [
            {"id": number, "video_id": VIDEO_ID, "category_id": category} for number, category in sorted(tracks.items())
        ],
    }
    images = (
        image_entry(frame.index + 1, file_name(frame.index), frame.size)
        | {"video_id": VIDEO_ID, "frame_index": frame.index}
        for frame in frames()
    )
    annotations = (
        annotation_entry(frame.index + 1, entry, numbers) | {"video_id": VIDEO_ID}
        for frame in frames()
        for entry in frame.annotations
    )
    with write_file(path) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        # One JSON object, whose long lists are written entry by entry.
        file.write(_json(head).removesuffix("}"))
        file.write(',\n"images": [')
        file.writelines(_listed(images))
        file.write('],\n"annotations": [')
        file.writelines(_listed({"id": number} | entry for number, entry in enumerate(annotations, 1)))
        file.write("]}\n")


def _listed(entries: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of a list in JSON, without its brackets."""
    for number, entry in enumerate(entries):
        yield f"{',' if number else ''}\n{_json(entry)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
