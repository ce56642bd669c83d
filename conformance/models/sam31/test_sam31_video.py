"""A compiled SAM 3.1 tracks objects in slots as PyTorch's modules do, which read no padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conformance.support.commands import run_command
from conformance.support.folders import AnswersOnce, CompiledCheckpoint
from harness.core.case import DEFAULT_STRATEGY, TINY, Case, Scale
from harness.core.outcome import Verdict, VerdictKind
from harness.models.sam3.fixtures import read_questions
from harness.models.sam3.patches.patch import wrapped
from harness.models.sam3.upstream import upstream
from harness.models.sam3.video.questions import SessionQuestion
from harness.models.sam3.weights import seed_weights
from harness.models.sam31.build import build_architecture
from harness.models.sam31.video import SESSIONS, ComparedTracker, judge_steps
from harness.parity.oracle import reference
from harness.parity.references import Reference, select
from harness.runtime import Sam3
from harness.runtime.sam3.video.detector import Detections, Detector
from harness.runtime.sam3.video.memory_bank import AttentionInputs
from harness.runtime.sam3.video.multiplex import MEMORIES, PROPAGATION_FEATURES, MultiplexTracker
from harness.runtime.sam3.video.rules import MULTIPLEX
from harness.runtime.sam3.video.session import Session, TrackedFrame
from harness.runtime.sam3.video.slots import Placement, Slots
from harness.runtime.sam3.video.tracker import from_bfloat16, to_bfloat16

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


@pytest.fixture(scope="module")
def pytorch() -> Any:
    model = build_architecture(TINY)
    seed_weights(model, 0)
    return model


@contextmanager
def compared(artifact: AnswersOnce, pytorch: Any) -> Iterator[ComparedTracker]:
    with upstream():
        tracker = ComparedTracker(artifact, pytorch, reference)
        with wrapped(artifact, "call", tracker.call):
            yield tracker


def verdicts_on(tracker: ComparedTracker) -> tuple[Verdict, ...]:
    arrays = tracker.arrays()
    outputs = select(arrays, "pytorch")
    return tuple(judge_steps("session", select(arrays, "compiled"), Reference(outputs, outputs)))


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


def test_each_step_of_a_session_is_pytorchs(
    artifact: AnswersOnce, pytorch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compared(artifact, pytorch) as tracker:
        expected = tracked(Session(Sam3(artifact), tracker, frames(), tracker.rules, keep=True))
    verdicts = verdicts_on(tracker)
    _, many = (f"track_objects_{count}" for count in MEMORIES)
    assert {verdict.name.split("/")[1] for verdict in verdicts} == {*MultiplexTracker.entries} - {many}
    assert [verdict for verdict in verdicts if verdict.kind is not VerdictKind.STRICT] == []
    monkeypatch.setattr("harness.runtime.sam3.video.multiplex.MEMORIES", MEMORIES[-1:])  # more padding
    free = tracked(Sam3(artifact).start_session(frames(), keep=True))
    assert len(free) == len(expected) == FRAMES + 3
    for ours, theirs in zip(free, expected, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert (ours.masks == theirs.masks).mean(axis=(1, 2)).min(initial=1) > 0.999


def track_and_encode(tracker: ComparedTracker) -> None:
    """Tracks objects, between which a slot is free, from two memories, and encodes their masks."""
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    slots = Slots((0, 2, 3), (4,))
    shapes = (1, 32, 288, 288), (1, 64, 144, 144), (1, 256, 72, 72)
    features = {name: drawn(*shape) for name, shape in zip(PROPAGATION_FEATURES, shapes, strict=True)}
    attended = AttentionInputs(
        memories=to_bfloat16(drawn(2, 1, 256, 72, 72)),
        ranks=np.array([6, 0]),
        pointers=drawn(2, 1, 16, 256),
        times=drawn(2),
        features=drawn(2, 256, 72, 72),
    )
    tracker.track(features, attended, slots)
    placement = Placement(slots, np.array([1, 0, 0], np.float32))
    tracker.encode_memory(features, drawn(3, 1152, 1152), drawn(3), placement)


MUX = Slots.mux
TRACKED = {f"track_objects_{MEMORIES[0]}/{output}" for output in ("logits", "pointers", "object_logits", "iou")}
FAULTS: dict[str, tuple[str, Any, set[str]]] = {
    "the next slot": (
        "slots.Slots.mux",
        lambda slots, values: np.roll(MUX(slots, values), 1, axis=1),
        TRACKED | {"encode_memory/memory"},
    ),
    "memories in another order": ("multiplex.from_bfloat16", lambda bits: from_bfloat16(bits)[::-1], TRACKED),
}
"""By what goes wrong, the name that is replaced, what replaces it, and where it must be seen."""


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_faults_of_the_tracker_are_seen_where_they_are(
    artifact: AnswersOnce, pytorch: Any, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    if fault is not None:
        name, replacement, seen = FAULTS[fault]
        monkeypatch.setattr(f"harness.runtime.sam3.video.{name}", replacement)
    with compared(artifact, pytorch) as tracker:
        track_and_encode(tracker)
    verdicts = verdicts_on(tracker)
    assert len(verdicts) == len(TRACKED) + 1
    assert {v.name.removeprefix("session/") for v in verdicts if v.kind is not VerdictKind.STRICT} == seen


def test_sessions_ask_for_everything() -> None:
    sessions = read_questions(SESSIONS, SessionQuestion)
    requests = [request for session in sessions for request in session.requests]
    assert any(request.text for request in requests) and any(request.mask for request in requests)
    assert any(request.points for request in requests) and {request.reverse for request in requests} == {True, False}
    full = Case("sam31_video", DEFAULT_STRATEGY, "llvm", Scale.FULL)
    assert [session.name for session in sessions if session.is_asked(full)] == ["corrections"]


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
