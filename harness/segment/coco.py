"""COCO's format of annotated images: a data set that `pycocotools.coco.COCO` loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.segment.objects import Mask, Objects, corners_of_mask, decoded, encoded

INFO = {"description": "Objects that SAM 3 found, with their scores"}
"""What a data set says about itself."""


@dataclass(frozen=True)
class AnnotatedImage:
    """An image and the objects that were found in it.

    Attributes:
        file_name: The image, below the folder that all images of the data set lie in.
        size: Width and height in pixels.
        annotations: Entries of `coco_annotations`.
    """

    file_name: str
    size: tuple[int, int]
    annotations: Sequence[dict[str, Any]]


def coco_annotations(objects: Objects) -> list[dict[str, Any]]:
    """Makes an entry for each object, in their order.

    Returns:
        `category` is the object's name, `score` its score, and `predicted_bbox` its box as it was found, (x, y, width,
        height) in pixels, which may reach beyond the image. The rest is COCO's: `bbox` is the box of the mask, `area`
        counts the pixels of the mask, and `segmentation` has `size` (height, width) and `counts`, COCO's compressed
        run-length encoding, which `pycocotools.mask.decode` reads. An object whose mask has no pixels has area 0 and
        the box (0, 0, 0, 0).
    """
    masks = encoded(objects.masks)
    return [
        {
            "category": category,
            "score": float(score),
            "bbox": _extent(corners_of_mask(mask)),
            "area": int(mask.sum()),
            "segmentation": runs,
            "predicted_bbox": _extent(box),
        }
        for mask, runs, box, score, category in zip(
            masks, masks.runs, objects.boxes, objects.scores, objects.categories, strict=True
        )
    ]


def data_set(images: Sequence[AnnotatedImage], categories: Sequence[str]) -> dict[str, Any]:
    """Makes a data set in COCO's format (https://cocodataset.org/#format-data), ids counted from 1.

    Args:
        images: The images; one without objects is an image of the data set as well.
        categories: All names that annotations may have; a name counts once.

    Returns:
        `info`, `licenses`, `images`, `categories` and `annotations`; each annotation has its `score` besides.
    """
    numbers = category_numbers(categories)
    entries = [
        annotation_entry(image_id, entry, numbers)
        for image_id, image in enumerate(images, 1)
        for entry in image.annotations
    ]
    return {
        "info": INFO,
        "licenses": [],
        "images": [image_entry(image_id, image.file_name, image.size) for image_id, image in enumerate(images, 1)],
        "categories": category_entries(numbers),
        "annotations": [{"id": number} | entry for number, entry in enumerate(entries, 1)],
    }


def image_entry(image_id: int, file_name: str, size: tuple[int, int]) -> dict[str, Any]:
    """Makes the entry of a data set's `images` for an image of this width and height."""
    return {"id": image_id, "file_name": file_name, "width": size[0], "height": size[1]}


def annotation_entry(image_id: int, entry: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    """Makes the entry of a data set's `annotations`, without its id, from one of `coco_annotations`.

    Args:
        image_id: Of the image.
        entry: The entry, whose category is a name.
        numbers: What `category_numbers` returned.
    """
    rest = {name: value for name, value in entry.items() if name != "category"}
    return {"image_id": image_id, "category_id": numbers[entry["category"]], "iscrowd": 0} | rest


def category_numbers(names: Sequence[str]) -> dict[str, int]:
    """Numbers the names of categories from 1; a name counts once."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}


def category_entries(numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Makes the entries of a data set's `categories` from `category_numbers`."""
    return [{"id": number, "name": name, "supercategory": ""} for name, number in numbers.items()]


def mask_of(annotation: dict[str, Any]) -> Mask:
    """Decodes the mask [h, w] of an entry of `coco_annotations`."""
    return decoded(annotation["segmentation"])


def _extent(corners: Iterable[float]) -> list[float]:
    x0, y0, x1, y1 = corners
    return [float(x0), float(y0), float(x1 - x0), float(y1 - y0)]
