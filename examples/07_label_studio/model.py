"""A Label Studio ML backend that draws a mask for each object of the project's labels, by asking `sam3-tvm serve`."""

import base64
import json
import os
from pathlib import Path
from urllib.request import Request, urlopen

from label_studio_ml.model import LabelStudioMLBase
from label_studio_ml.utils import get_single_tag_keys
from label_studio_sdk.converter.brush import mask2rle
from pycocotools import mask as coco

SERVICE = os.environ.get("SAM3_TVM_URL", "http://localhost:8364")


def segment(path: str, labels: list[str]) -> dict:
    """Returns the objects of all labels in an image, in COCO's format."""
    question = {"image": base64.b64encode(Path(path).read_bytes()).decode(), "texts": labels}
    request = Request(f"{SERVICE}/segment", json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return json.load(answer)


class Sam3Backend(LabelStudioMLBase):
    """Predicts brush labels; the texts for SAM 3 are the labels of the project."""

    def predict(self, tasks, **_):
        """Returns a prediction for each task."""
        from_name, to_name, key, labels = get_single_tag_keys(self.parsed_label_config, "BrushLabels", "Image")

        def region(annotation, names, image):
            mask = coco.decode(annotation["segmentation"]) * 255
            return {
                "from_name": from_name,
                "to_name": to_name,
                "type": "brushlabels",
                "original_width": image["width"],
                "original_height": image["height"],
                "image_rotation": 0,
                "score": annotation["score"],
                "value": {"format": "rle", "rle": mask2rle(mask), "brushlabels": [names[annotation["category_id"]]]},
            }

        predictions = []
        for task in tasks:
            found = segment(self.get_local_path(task["data"][key]), labels)
            names = {category["id"]: category["name"] for category in found["categories"]}
            regions = [region(annotation, names, found["images"][0]) for annotation in found["annotations"]]
            scores = [entry["score"] for entry in regions]
            predictions.append({"result": regions, "score": max(scores, default=0), "model_version": "sam3-tvm"})
        return predictions
