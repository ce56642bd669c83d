"""Clicks on an object, marks what is not part of it, and writes the mask: clicks.py MODEL MASK."""

import sys
from pathlib import Path

from PIL import Image

from harness.runtime import Sam3

PHOTO = Path(__file__).parents[2] / "fixtures/images/cat.png"

model = Sam3.load(sys.argv[1])
image = model.set_image(PHOTO)
clicked = image.predict(points=[(200, 150)])
print("three masks, with IoU as the model predicts it:", *(f"{iou:.2f}" for iou in clicked.iou))
better = image.predict(points=[(200, 150), (430, 20)], labels=[1, 0], mask=clicked.logits[clicked.best])
mask = better.masks[better.best]
Image.fromarray(mask).save(sys.argv[2])
print(int(mask.sum()), "pixels")
