"""Defines models whose answers are known at once, for tests of written files: dark pixels are the object."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image

from harness.core.files import write_file
from harness.runtime import Found, Outputs, Prompt
from harness.runtime.sam3.segmentation import SegmentationHead
from harness.runtime.sam3.video.frames import open_frames
from harness.runtime.sam3.video.session import TrackedFrame

SIZE = (24, 18)
NOTHING = np.zeros((0,), np.float32)


def write_pictures(folder: Path, count: int) -> list[Path]:
    """Writes pictures of 24 x 18 pixels, no two of which have the same objects."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.png" for number in range(count)]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 256, (SIZE[1], SIZE[0], 3), np.uint8)
        Image.fromarray(pixels).save(path)
    return paths


def masks_of(pixels: np.ndarray) -> np.ndarray:
    """Returns the objects in a picture: dark pixels of each colour; its first pixel says how many, one to three."""
    return np.moveaxis(pixels < 64, 2, 0)[: 1 + int(pixels[0, 0, 0]) % 3]


class KnownSegmenter:
    """Answers `harness.app.segment.job.run`, and counts the pictures that it was given."""

    manifest = SimpleNamespace(files={})

    def __init__(self) -> None:
        self.encoded = 0

    def check_prompt(self, prompt: Prompt) -> None:
        """Finds nothing wrong with it."""

    encode_prompt = encode_object_prompt = lambda self, prompt, size: None

    def set_image(self, pixels: np.ndarray) -> Any:
        """Gives a picture that can be asked."""
        self.encoded += 1
        masks = masks_of(pixels)
        outputs = Outputs(*[NOTHING] * 5, SegmentationHead(None, {}, {}))
        boxes, scores = np.zeros((len(masks), 4), np.float32), np.full(len(masks), 0.75, np.float32)
        found = Found(
            lambda: iter([masks]), boxes, scores, np.arange(len(masks)), outputs, (pixels.shape[1], pixels.shape[0])
        )
        return SimpleNamespace(segment_each=lambda prompts, threshold, has_masks: iter([found] * len(prompts)))


@dataclass
class KnownSession:
    """A session of a `KnownTracker`, which has given out the frames before `position`."""

    source: Path
    position: int | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        self.frames = open_frames(self.source)

    @property
    def next_frame(self) -> int | None:
        """No frame is held back."""
        return self.position

    def add_prompt(self, frame: int, texts: Sequence[str], box: Any = None) -> None:
        """Tracks what there is, whatever it is called."""
        self.text = texts[0]

    def propagate(self, after_frame: Callable[[], None]) -> Iterator[TrackedFrame]:
        """Gives out each frame."""
        for index, pixels in enumerate(self.frames):
            if index >= (self.position or 0):
                self.position = index + 1
                after_frame()
                masks = masks_of(pixels)
                count, zeros = len(masks), np.zeros((len(masks), 4), np.float32)
                scores = np.full(count, 0.75, np.float32)
                yield TrackedFrame(index, pixels, np.arange(count), scores, zeros, masks, (self.text,) * count)

    def save(self, path: Path) -> None:
        """Saves how far it is."""
        with write_file(path) as temporary:
            temporary.write_text(json.dumps([self.position, self.text]))


class KnownTracker:
    """Answers `harness.app.track.job.run`."""

    manifest = SimpleNamespace(to_json=lambda: "{}")

    def start_session(self, video: Path) -> KnownSession:
        """Begins with the first frame."""
        return KnownSession(video)

    def resume_session(self, path: Path, video: Path) -> KnownSession:
        """Goes on with a session that was saved."""
        return KnownSession(video, *json.loads(path.read_text()))
