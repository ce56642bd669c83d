"""A CVAT auto-annotation function that finds the objects of some classes, by asking `sam3-tvm serve`."""

import base64
import io
import json
import os
from urllib.request import Request, urlopen

import cvat_sdk.auto_annotation as cvataa
from cvat_sdk.masks import encode_mask
from pycocotools import mask as coco

SERVICE = os.environ.get("SAM3_TVM_URL", "http://localhost:8364")


class Sam3Function:
    """Detects masks; the texts for SAM 3 are the names of the classes."""

    def __init__(self, classes):
        """Takes the names of the classes."""
        self.classes = classes

    @property
    def spec(self):
        """Returns the labels that CVAT maps to those of a task."""
        labels = [cvataa.label_spec(name, number, type="mask") for number, name in enumerate(self.classes)]
        return cvataa.DetectionFunctionSpec(labels=labels)

    def detect(self, context, image):
        """Returns a mask for each object in an image."""
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "PNG")
        question = {"image": base64.b64encode(buffer.getvalue()).decode(), "texts": self.classes}
        if context.conf_threshold is not None:
            question["threshold"] = context.conf_threshold
        request = Request(f"{SERVICE}/segment", json.dumps(question).encode(), {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            found = json.load(answer)
        numbers = {category["id"]: self.classes.index(category["name"]) for category in found["categories"]}
        return [
            cvataa.mask(
                numbers[annotation["category_id"]],
                encode_mask(coco.decode(annotation["segmentation"]).astype(bool)),
                score=annotation["score"],
            )
            for annotation in found["annotations"]
            if annotation["area"]
        ]


def create(classes: str) -> Sam3Function:
    """Returns the function for classes that commas separate; `cvat-cli` calls this."""
    return Sam3Function(classes.split(","))
