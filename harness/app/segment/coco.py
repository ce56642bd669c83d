"""Makes data sets in COCO's format, which `pycocotools.coco.COCO` loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.app.segment.objects import Mask, Objects, corners_of_mask, decode_mask, encode_masks

INFO = {"description": "Objects that SAM 3 found, with their scores"}
"""The `info` of a data set."""


@dataclass(frozen=True)
class AnnotatedImage:
    """An image and its annotated objects.

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
        area 0 and the box (0, 0, 0, 0).
    """
    masks = encode_masks(objects.masks)
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
    """Makes a data set in COCO's format (https://cocodataset.org/#format-data), with ids that start at 1.

    Args:
        images: The images, including those without objects.
        categories: All categories of the annotations; duplicates are ignored.

    Returns:
        `info`, `licenses`, `images`, `categories` and `annotations`; each annotation also has its `score`.
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
        image_id: Id of the image.
        entry: The entry, whose category is a name.
        numbers: The result of `category_numbers`.
    """
    fields = {name: value for name, value in entry.items() if name != "category"}
    return {"image_id": image_id, "category_id": numbers[entry["category"]], "iscrowd": 0} | fields


def category_numbers(names: Sequence[str]) -> dict[str, int]:
    """Numbers the names of categories from 1; duplicates are ignored."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}


def category_entries(numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Makes the entries of a data set's `categories` from `category_numbers`."""
    return [{"id": number, "name": name, "supercategory": ""} for name, number in numbers.items()]


def annotation_mask(annotation: dict[str, Any]) -> Mask:
    """Decodes the mask [h, w] of an entry of `coco_annotations`."""
    return decode_mask(annotation["segmentation"])


def _extent(corners: Iterable[float]) -> list[float]:
    x0, y0, x1, y1 = corners
    return [float(x0), float(y0), float(x1 - x0), float(y1 - y0)]
