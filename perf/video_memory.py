"""Resident memory of a session on a stream that never ends, and what it remembers of each object.

    python -m perf.video_memory --model dist/sam3-video --first 50 --last 5000
    python -m perf.video_memory --model dist/sam3-video --first 50 --last 5000 --click --encode-every 10

The stream is synthetic: the frames of fixtures/clip.toml, to and fro. A box on the first frame makes objects that stay,
a click makes one.

The image encoder takes most of a frame's time and remembers nothing, and the stream shows three pictures. So its
results may be kept for each of them, and computed again on some frames alone; everything else runs on every frame.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.models.sam3.tracker.clip import load_clip
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact, Tensors
from harness.runtime.sam3.video.session import Session
from perf.memory import resident

LARGEST_GROWTH = 0.02
"""Growth of resident memory that counts as none."""
LARGEST_OBJECT = 12 << 20
"""Bytes that an object may take besides the weights."""
BOX = (0.47, 0.21, 0.99, 0.83)
"""Of the prompt on the first frame, normalized to [0, 1]."""


@dataclass(frozen=True)
class Usage:
    """What a session uses after a frame.

    Attributes:
        frame: The number of the last frame that was processed.
        resident: Resident bytes of the process; None where the system does not tell.
        objects: The number of tracked objects.
        remembered: Bytes that the session remembers, masks that are held back included.
    """

    frame: int
    resident: int | None
    objects: int
    remembered: int

    @property
    def bytes_of_object(self) -> float:
        """Bytes for each object."""
        return self.remembered / max(self.objects, 1)


class KeptEncodings:
    """A loaded model that computes what it knows of a picture again on some frames alone.

    Attributes:
        folder, manifest: Those of the model.
    """

    def __init__(self, artifact: Artifact, every: int) -> None:
        """Takes the model, and of how many frames one is encoded again."""
        self.folder, self.manifest = artifact.folder, artifact.manifest
        self.fetch, self.reading_once = artifact.fetch, artifact.reading_once
        self._artifact, self._every = artifact, every
        self._frames = 0
        self._kept: dict[bytes, tuple[Tensors, Tensors]] = {}

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point, or returns what it gave for the same picture."""
        if entry == "encode_image":
            self._frames += 1
            picture = hashlib.blake2b(self.fetch(inputs["pixels"]).tobytes()).digest()
            if picture not in self._kept or self._frames % self._every == 0:
                features = self._artifact.call(entry, **inputs)
                self._kept[picture] = features, self._artifact.call("interactive_features", trunk=features["trunk"])
            return self._kept[picture][0]
        if entry == "interactive_features":
            return next(given for features, given in self._kept.values() if features["trunk"] is inputs["trunk"])
        return self._artifact.call(entry, **inputs)


def usage(model: Sam3, every: int, *, click: bool = False) -> Iterator[Usage]:
    """Tracks objects through the stream; tells what is used after so many frames, for ever.

    Args:
        model: A model that was compiled with `--video`.
        every: After how many frames.
        click: Whether one object is clicked; otherwise a box finds several.
    """
    session, clip = model.start_session(_stream()), load_clip()
    width, height = clip.picture(0).size
    if click:
        x, y = clip.center(0)
        session.add_prompt(0, object_id=1, points=[(x * width, y * height)], labels=[1])
    else:
        session.add_prompt(0, box=tuple(np.array(BOX) * (width, height, width, height)))
    for frame in session.propagate():
        if frame.index % every == 0:
            yield _used(session, frame.index)


def growth(first: Usage, last: Usage) -> float:
    """How much more memory is resident, as a share of the first."""
    assert first.resident is not None
    assert last.resident is not None
    return last.resident / first.resident - 1


def _used(session: Session, frame: int) -> Usage:
    return Usage(frame, resident(), len(session.objects), session.nbytes)


def _stream() -> Iterator[npt.NDArray[np.uint8]]:
    clip = load_clip()
    pictures = [np.asarray(clip.picture(number)) for number in range(len(clip.places))]
    for number in itertools.count():
        yield pictures[clip.view(number)]


def main() -> None:
    """Prints what is used, and fails where memory grows or an object takes too much."""
    parser = argparse.ArgumentParser(description="Resident memory of a session on a stream that never ends.")
    parser.add_argument("--model", type=Path, required=True, help="a folder of `sam3-tvm compile --video`")
    parser.add_argument("--first", type=int, default=50, help="the frame that others are compared with")
    parser.add_argument("--last", type=int, default=5000, help="the last frame")
    parser.add_argument("--every", type=int, default=50, help="frames between two lines")
    parser.add_argument("--click", action="store_true", help="track one object that is clicked, not those of a box")
    parser.add_argument("--encode-every", type=int, default=1, help="encode one of so many frames, see above")
    given: Any = parser.parse_args()
    first: Usage | None = None
    start = time.monotonic()
    artifact = Artifact.load(given.model)
    loaded = artifact if given.encode_every == 1 else KeptEncodings(artifact, given.encode_every)
    for used in usage(Sam3(loaded), given.every, click=given.click):
        minutes = (time.monotonic() - start) / 60
        megabytes = "n/a" if used.resident is None else f"{used.resident / 1e6:.0f}"
        print(
            f"frame {used.frame} of {given.last}: {megabytes} MB resident, {used.objects} objects with "
            f"{used.bytes_of_object / 1e6:.2f} MB each, {minutes:.1f} min",
            flush=True,
        )
        if first is None and used.frame >= given.first:
            first = used
        if used.frame >= given.last:
            break
    assert first is not None
    grown = 0.0 if first.resident is None else growth(first, used)
    print(f"{grown:+.2%} from frame {first.frame} to frame {used.frame}")
    if grown > LARGEST_GROWTH or used.bytes_of_object > LARGEST_OBJECT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
