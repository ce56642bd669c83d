"""Makes data sets in COCO's format, which `pycocotools.coco.COCO` loads, of photographs or of the frames of a video.

COCO: https://cocodataset.org/#format-data. A video has the fields of TAO that link the annotations of an object, too:
https://github.com/TAO-Dataset/tao/blob/master/docs/file_format.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from pycocotools import mask as coco

from harness.app.results.objects import Objects, box_of_mask
from harness.core.files import write_file

_INFO = {"description": "Objects that SAM 3 found, with their scores"}
_VIDEO = {"video_id": 1}
"""The field of images and annotations that names the only video."""


class Annotation(TypedDict):
    """The form of an entry of `coco_annotations`."""

    category: str
    score: float
    bbox: list[float]
    area: int
    segmentation: dict[str, Any]
    predicted_bbox: list[float]


class TrackAnnotation(Annotation):
    """The same of an object of a video."""

    track_id: int


@dataclass(frozen=True)
class AnnotatedImage:
    """An image or a frame, and its annotated objects.

    Attributes:
        file_name: The image, relative to the common folder of all images of the data set.
        size: Width and height in pixels.
        annotations: Entries of `coco_annotations`.
    """

    file_name: str
    size: tuple[int, int]
    annotations: Sequence[dict[str, Any]]


def coco_annotations(objects: Objects) -> list[dict[str, Any]]:
    """Makes an entry for each object, in their order.

    Returns:
        `category` is the object's category, `score` its score, and `predicted_bbox` its predicted box, (x, y, width,
        height) in pixels, which may reach beyond the image. The other fields are COCO's: `bbox` is the box of the mask,
        `area` counts the pixels of the mask, and `segmentation` has `size` (height, width) and `counts`, COCO's
        compressed run-length encoding, which `pycocotools.mask.decode` reads. An object whose mask has no pixels has
        area 0 and the box (0, 0, 0, 0). An object of a video begins with its id, `track_id`.
    """
    entries: list[dict[str, Any]] = [
        {
            "category": category,
            "score": float(score),
            "bbox": box_of_mask(runs),
            "area": int(coco.area(runs)),
            "segmentation": runs,
            "predicted_bbox": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
        }
        for runs, (x0, y0, x1, y1), score, category in zip(
            objects.runs, objects.boxes, objects.scores, objects.categories, strict=True
        )
    ]
    if objects.ids is None:
        return entries
    return [{"track_id": number} | entry for number, entry in zip(objects.ids, entries, strict=True)]


def data_set(images: Sequence[AnnotatedImage], categories: Sequence[str]) -> dict[str, Any]:
    """Makes a data set of photographs, with ids that start at 1.

    Args:
        images: The images, including those without objects.
        categories: All categories of the annotations; duplicates are ignored.

    Returns:
        `info`, `licenses`, `images`, `categories` and `annotations`; each annotation also has its `score`.
    """
    numbers = _category_numbers(categories)
    return {
        "info": _INFO,
        "licenses": [],
        "images": list(_image_entries(images)),
        "categories": _category_entries(numbers),
        "annotations": list(_annotation_entries(images, numbers)),
    }


def write_video_data_set(
    path: Path, video: str, frames: Callable[[], Iterator[AnnotatedImage]], categories: Sequence[str]
) -> None:
    """Writes the data set of a video, without holding it in memory as a whole.

    `images` has an entry for each frame, with `video_id` and `frame_index`; `tracks` has one for each object, whose id
    `annotations` have in `track_id`. All ids but those of objects start at 1.

    Args:
        path: The file.
        video: Name of the video.
        frames: Returns an iterator of the finished frames from the first on; called several times.
        categories: All categories of the annotations.

    Raises:
        HarnessError: The file cannot be written; an earlier file stays.
    """
    numbers = _category_numbers(categories)
    tracks: dict[int, int] = {}
    (width, height), length = (0, 0), 0
    for frame in frames():
        (width, height), length = frame.size, length + 1
        tracks |= {entry["track_id"]: numbers[entry["category"]] for entry in frame.annotations}
    head = {
        "info": _INFO,
        "licenses": [],
        "videos": [{"id": 1, "name": video, "width": width, "height": height, "length": length}],
        "categories": _category_entries(numbers),
        "tracks": [{"id": number} | _VIDEO | {"category_id": tracks[number]} for number in sorted(tracks)],
    }
    images = (entry | _VIDEO | {"frame_index": index} for index, entry in enumerate(_image_entries(frames())))
    annotations = (entry | _VIDEO for entry in _annotation_entries(frames(), numbers))
    with write_file(path) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        # One JSON object, whose long lists are written entry by entry.
        file.write(_json(head).removesuffix("}"))
        for name, entries in (("images", images), ("annotations", annotations)):
            file.write(f',\n"{name}": [')
            file.writelines(f"{',' if number else ''}\n{_json(entry)}" for number, entry in enumerate(entries))
            file.write("]")
        file.write("}\n")


class DistinctNames:
    """Names that differ in more than case."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def take(self, stem: str, suffix: str = "") -> str:
        """Joins a stem and a suffix to a name, with a number after the stem where an earlier name is equal."""
        name = first = f"{stem}{suffix}"
        number = self._numbers.get(first.casefold(), 1)
        while name.casefold() in self._numbers:
            number += 1
            name = f"{stem}_{number}{suffix}"
        self._numbers[name.casefold()] = 1
        self._numbers[first.casefold()] = number
        return name


def distinct_names(names: Iterable[tuple[str, str]]) -> list[str]:
    """Joins stems and suffixes to names, with a number after the stem where an earlier name is equal but for case."""
    distinct = DistinctNames()
    return [distinct.take(stem, suffix) for stem, suffix in names]


def _image_entries(images: Iterable[AnnotatedImage]) -> Iterator[dict[str, Any]]:
    for number, image in enumerate(images, 1):
        yield {"id": number, "file_name": image.file_name, "width": image.size[0], "height": image.size[1]}


def _annotation_entries(images: Iterable[AnnotatedImage], numbers: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    count = 0
    for image_id, image in enumerate(images, 1):
        for entry in image.annotations:
            count += 1
            fields = {name: value for name, value in entry.items() if name != "category"}
            ids = {"id": count, "image_id": image_id, "category_id": numbers[entry["category"]]}
            yield ids | {"iscrowd": 0} | fields


def _category_numbers(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}


def _category_entries(numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"id": number, "name": name, "supercategory": ""} for name, number in numbers.items()]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
