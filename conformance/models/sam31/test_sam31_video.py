"""A compiled SAM 3.1 tracks objects in slots as PyTorch's modules do, which read no padding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conformance.support.commands import run_command
from conformance.support.folders import AnswersOnce, CompiledCheckpoint
from harness.core.case import TINY
from harness.models.sam3.deployed.interactive import MaskPrediction
from harness.models.sam3.upstream import upstream
from harness.models.sam3.weights import seed_weights
from harness.models.sam31 import modules
from harness.models.sam31.build import build_architecture
from harness.models.sam31.deployed.entry_points import click_head
from harness.models.sam31.deployed.tracking import VideoFeatures
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact
from harness.runtime.sam3.video.detector import Detections, Detector
from harness.runtime.sam3.video.multiplex import MEMORIES, MultiplexTracker
from harness.runtime.sam3.video.rules import MULTIPLEX
from harness.runtime.sam3.video.session import Session, TrackedFrame

FRAMES = 3
BIRTHS = {0: 3, 1: 14, 2: 2}
"""New objects by frame: the second ones do not fit beside the first, and the last do."""
REMOVED = 1
CLICK = (40.0, 30.0)
SIZE = (96, 128)


@pytest.fixture
def folder(sam31_artifact: CompiledCheckpoint) -> Path:
    return sam31_artifact.folder


@pytest.fixture(scope="module")
def artifact(sam31_artifact: CompiledCheckpoint) -> AnswersOnce:
    return AnswersOnce.load(sam31_artifact.folder)


def pytorch_entries() -> dict[str, Callable[..., Sequence[torch.Tensor]]]:
    """Returns PyTorch's functions by the names of entry points."""
    model = build_architecture(TINY)
    seed_weights(model, 0)
    pointers, attention = modules.MultiplexPointers(model), modules.MultiplexMemoryAttention(model)
    decoder, encoder = modules.MultiplexMaskDecoder(model), modules.MultiplexMemoryEncoder(model)

    def track_objects(
        high_res_0: Any,
        high_res_1: Any,
        features: Any,
        memory_features: Any,
        memories: Any,
        ranks: Any,
        has_memory: Any,
        pointer: Any,
        times: Any,
        has_pointer: Any,
        valid: Any,
    ) -> Sequence[torch.Tensor]:
        tokens, positions = pointers(pointer[has_pointer], times[has_pointer])
        remembered = memory_features[has_memory], memories[has_memory], ranks[has_memory]
        (conditioned,) = attention(features, *remembered, tokens, positions)
        outputs: Sequence[torch.Tensor] = decoder(conditioned, high_res_0, high_res_1, valid)
        return outputs

    return {
        "interactive_features": VideoFeatures(model),
        "predict_masks": MaskPrediction(click_head(model), with_pointers=True).eval(),
        **{f"track_objects_{count}": track_objects for count in MEMORIES},
        "encode_memory": encoder,
        "encode_predicted_memory": encoder,
        "mask_pointer": modules.ClickMaskPointer(model),
    }


class Followed:
    """A compiled model with PyTorch's answers to what tracking asks; both get the same inputs and are compared."""

    def __init__(self, artifact: Artifact, entries: dict[str, Callable[..., Sequence[torch.Tensor]]]) -> None:
        self.artifact, self.entries = artifact, entries
        self.errors: dict[str, float] = {}
        self.known: dict[tuple[str, ...], dict[str, np.ndarray]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.artifact, name)

    def fetch(self, tensor: Any) -> np.ndarray:
        return tensor if isinstance(tensor, np.ndarray) else self.artifact.fetch(tensor)

    def call(self, entry: str, **inputs: Any) -> Any:
        compiled = self.artifact.call(entry, **inputs)
        if entry not in self.entries:
            return compiled
        signature = self.artifact.manifest.entries[entry].inputs
        arrays = [np.array(self.fetch(inputs[each.name])) for each in signature]
        key = (entry, *(hashlib.sha256(array).hexdigest() for array in arrays))
        if key not in self.known:
            with torch.inference_mode():
                outputs = self.entries[entry](*map(torch.from_numpy, arrays))
            self.known[key] = dict(zip(compiled, (output.numpy() for output in outputs), strict=True))
        answers = self.known[key]
        for name, answer in answers.items():
            error = float(np.abs(self.fetch(compiled[name]) - answer).max() / np.abs(answer).max())
            self.errors[entry] = max(self.errors.get(entry, 0.0), error)
        return answers


def frames() -> list[np.ndarray]:
    random = np.random.default_rng(31)
    scene = random.integers(0, 256, (*SIZE, 3), np.uint8)
    return [np.roll(scene, 2 * number, axis=1) for number in range(FRAMES)]


def detections(index: int) -> Detections:
    """Returns squares at places of their own, the new ones alone."""
    first = sum(count for frame, count in BIRTHS.items() if frame < index)
    count = BIRTHS.get(index, 0)
    logits = np.full((count, 288, 288), -8, np.float32)
    for row in range(count):
        y, x = divmod(first + row, 5)
        logits[row, 57 * y : 57 * y + 40, 57 * x : 57 * x + 40] = 8
    return Detections(np.arange(count), np.full(count, 0.9, np.float32), logits > 0, logits)


@pytest.fixture(autouse=True)
def scripted_detector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Detector, "detect", lambda _self, frame, *_: (detections(frame.index),))
    # Masks of drawn weights cover the picture, and by the smaller area every detection would be one of them.
    monkeypatch.setattr(MultiplexTracker, "rules", replace(MULTIPLEX, multiplex=False))


def slots(session: Session) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns the places of the objects that share conditioning frames."""
    banks = [bucket.bank for bucket in session.processor.progress.groups[0].buckets.values()]
    return {bank.objects: bank.slots.places for bank in banks if bank.slots is not None}


def tracked(session: Session) -> list[TrackedFrame]:
    """Finds objects in slots of two buckets, removes one, clicks another, and tracks that one again."""
    left = iter(range(FRAMES))

    def after_frame() -> None:
        if next(left) == 2:
            session.remove_object(REMOVED)

    session.add_prompt(0, "squares")
    frames = list(session.propagate(after_frame=after_frame))
    assert slots(session) == {(0, 2): (0, 2), tuple(range(3, 19)): tuple(range(16))}
    clicked = session.add_prompt(1, object_id=0, points=[CLICK])
    assert slots(session) == {(2,): (2,), tuple(range(3, 19)): tuple(range(16)), (0,): (0,)}
    return [*frames, clicked, *session.propagate(start=1, limit=1)]


def test_a_session_is_pytorchs(artifact: AnswersOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    with upstream():
        followed = Followed(artifact, pytorch_entries())
        expected = tracked(Sam3(followed).start_session(frames(), keep=True))
    _, many = (f"track_objects_{count}" for count in MEMORIES)
    assert followed.errors.keys() == followed.entries.keys() - {many}
    assert max(followed.errors.values()) < 1e-5, followed.errors
    monkeypatch.setattr("harness.runtime.sam3.video.multiplex.MEMORIES", MEMORIES[-1:])  # more padding
    free = tracked(Sam3(artifact).start_session(frames(), keep=True))
    assert len(free) == len(expected) == FRAMES + 3
    for ours, theirs in zip(free, expected, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert (ours.masks == theirs.masks).mean(axis=(1, 2)).min(initial=1) > 0.999


def test_a_saved_session_goes_on(artifact: AnswersOnce, tmp_path: Path) -> None:
    model = Sam3(artifact)
    session = model.start_session(frames()[:2])
    session.add_prompt(0, "squares")
    whole = list(session.propagate(after_frame=lambda: session.save(tmp_path / "session")))
    resumed = list(model.resume_session(tmp_path / "session", frames()[:2]).propagate())
    assert [frame.ids.tolist() for frame in resumed] == [frame.ids.tolist() for frame in whole]


# Every night: the command is that of SAM 3 (`conformance/cli/test_track_command.py`), and sessions are as above.
@pytest.mark.wide
def test_the_command_tracks_without_an_option(folder: Path, tmp_path: Path) -> None:
    clip, out = tmp_path / "clip", tmp_path / "out"
    clip.mkdir()
    for number, pixels in enumerate(frames()[:2]):
        Image.fromarray(pixels).save(clip / f"{number}.png")
    done = run_command("track", str(clip), "--click", "40,30", "--model", str(folder), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in 2 frames" in done.stdout + done.stderr
