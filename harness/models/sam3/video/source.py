"""Computes upstream's answer to a question about a video and the steps of its tracker, cached on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case import Case
from harness.core.program import Arrays
from harness.core.settings import Settings
from harness.models.sam3.source import BUILDER, ORACLE, SHARED, build, cache_key, shared_trunk
from harness.models.sam3.video import STEP
from harness.models.sam3.video.questions import Pixels, Question, frames_of
from harness.models.sam3.video.sessions.scripts import Script
from harness.runtime.sam3.video.bfloat16 import to_bfloat16
from harness.runtime.sam3.video.memory_bank import MemoryBank, MemoryEntry
from harness.runtime.sam3.video.memory_selection import Retention

if TYPE_CHECKING:
    from harness.models.sam3.video.upstream import MemoryDecisions, Step

_UPSTREAM = "harness.models.sam3.video.upstream"
_SESSIONS = "harness.models.sam3.video.sessions.upstream"
_EXACT, _STEP = "float64:", "step "
"""Prefixes of the names of the oracle's arrays and of a step's arrays in the cache."""
_TRACKED = ("logits", "object_logits", "memories")
"""Suffixes of the cached arrays of the run in float64."""


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A step of a bucket of B objects, from PyTorch's state.

    Attributes:
        frame: The frame.
        features: fp32 arrays of the frame: `high_res_0`, `high_res_1` and `features`.
        bank: Upstream's memories.
        masks: fp32 [B, 1152, 1152], the logits from which the frame's memory is encoded.
        present: fp32 [B], the object logits of the memory.
        reference: Upstream's outputs, by the names in `harness.models.sam3.video.STEP`.
        oracle: Upstream's outputs in float64.
    """

    frame: int
    features: Arrays
    bank: MemoryBank
    masks: Any
    present: Any
    reference: Arrays
    oracle: Arrays


@dataclass(frozen=True, eq=False)
class Answer:
    """Upstream's answer to a question.

    Attributes:
        question: The question.
        reference: fp32 arrays on the CPU, by answer and name: `0/…` answers the prompt, `1/…` is the prompt's frame,
            and so on, with the names in `harness.models.sam3.video.upstream.PARTS`.
        exact: `logits`, `object_logits` and `memories` in float64; None for a question that is asked in fp32 alone.
        steps: The steps from PyTorch's state.
    """

    question: Question
    reference: Arrays
    exact: Arrays | None
    steps: tuple[RecordedStep, ...]


class VideoSource:
    """Upstream's answers for a case; to be used inside `harness.models.sam3.upstream.upstream()`."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Opens the cache; the model is built for the first answer that is not in the cache.

        Raises:
            HarnessError: The cache cannot be used.
        """
        from harness.core.files import cache_root
        from harness.parity.cache import ArrayCache

        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._model: Any = None

    def answer(self, question: Question, actual: Arrays) -> Answer:
        """Returns upstream's answer to a question.

        Where rounding decides which objects are in a frame's memory, and the compiled model decided differently,
        upstream runs again with the compiled model's decisions. All later frames are then held to the consequences of
        the same decisions.

        Args:
            question: The question.
            actual: The compiled model's answer, of which `1/remembered` and so on are read.

        Raises:
            HarnessError: Checkpoint, video or cache cannot be used.
        """
        answer = self._answer(question, None)
        if rounding_decides_first(actual, answer.reference):
            answer = self._answer(question, _memory_decisions(question, actual))
        return answer

    def _answer(self, question: Question, decisions: MemoryDecisions | None) -> Answer:
        from harness.parity.cache import arrays_digest

        frames = frames_of(question)
        key = self._key(question, frames)
        if decisions is not None:
            key |= {"followed": arrays_digest({str(frame): flags for frame, flags in decisions.items()})}
        arrays = self._cache.get_or_make(key, lambda: self._compute(question, frames, decisions))
        exact = {name.removeprefix(_EXACT): array for name, array in arrays.items() if name.startswith(_EXACT)}
        reference = {name: array for name, array in arrays.items() if not name.startswith((_EXACT, _STEP))}
        return Answer(question, reference, exact or None, tuple(_steps(arrays)))

    def session(self, script: Script) -> Arrays:
        """Returns upstream's answers to the requests of a session, from `sessions.upstream.answers`.

        Raises:
            HarnessError: Checkpoint, video or cache cannot be used.
        """
        frames = frames_of(script)
        return self._cache.get_or_make(self._key(script, frames), lambda: self._session(script, frames))

    def _key(self, subject: Question | Script, frames: tuple[Pixels, ...]) -> dict[str, Any]:
        from harness.parity.cache import arrays_digest

        kind, module = ("video answer", _UPSTREAM) if isinstance(subject, Question) else ("video session", _SESSIONS)
        frames_digest = arrays_digest({str(number): frame for number, frame in enumerate(frames)})
        text = f"{asdict(replace(subject, video=Path(subject.video.name)))!r} {frames_digest}"
        return cache_key(kind, self._case, self._settings, [], text, (BUILDER, module, SHARED, ORACLE))

    def _session(self, script: Script, frames: tuple[Pixels, ...]) -> Arrays:
        from harness.models.sam3.video.sessions.upstream import answers

        model = self._video_model()
        with shared_trunk(model, self._cache, self._case, self._settings):
            return answers(model, script, frames)

    def _compute(self, question: Question, frames: tuple[Pixels, ...], decisions: MemoryDecisions | None) -> Arrays:
        from harness.models.sam3.video.upstream import Tracking
        from harness.parity.oracle import oracle, reference

        model = self._video_model()
        tracking = Tracking(model, question, frames, decisions=decisions)
        with shared_trunk(model, self._cache, self._case, self._settings):
            arrays = dict(reference(tracking, (), tracking.names))
            if question.float64:
                own_decisions = _memory_decisions(question, arrays)
                exact_tracking = Tracking(
                    model, replace(question, steps=()), frames, tracking.detections, own_decisions
                )
                exact = oracle(exact_tracking, (), exact_tracking.names)
                arrays |= {f"{_EXACT}{name}": exact[name] for name in exact if name.endswith(_TRACKED)}
        for name in [name for name in arrays if name.endswith("/memories")]:
            arrays[name] = to_bfloat16(arrays[name].astype(np.float32))  # exact, because the values are rounded
        for number, step in enumerate(tracking.steps):
            computed = oracle(step.module, (), STEP)
            arrays |= {
                f"{_STEP}{number}/{name}": array
                for name, array in (_flatten_step(step) | _with_oracle_prefix(computed)).items()
            }
        return arrays

    def _video_model(self) -> Any:
        from harness.models.sam3.build import build_video_model

        if self._model is None:
            image_model = build(self._case, self._settings, interactive=True)
            self._model = build_video_model(image_model, self._case.scale)
        return self._model


def rounding_decides_first(actual: Arrays, reference: Arrays) -> bool:
    """Returns whether the first frame whose memory has other objects than upstream's differs only by rounding."""
    for name in (name for name in reference if name.endswith("/remembered")):
        compiled, upstream = actual.get(name, reference[name]), reference[name]
        if not np.array_equal(compiled, upstream):
            undecided = reference[name.replace("remembered", "undecided")]
            return len(compiled) == len(upstream) and not (compiled != upstream)[~undecided].any()
    return False


def _memory_decisions(question: Question, arrays: Arrays) -> MemoryDecisions:
    """Returns the objects in the memory of each frame; answer 1 is the prompt's frame."""
    answers = range(1, question.length - question.frame + 1)
    return {question.frame + number - 1: arrays[f"{number}/remembered"] for number in answers}


def _with_oracle_prefix(oracle: Arrays) -> Arrays:
    return {f"oracle/{name}": array for name, array in oracle.items()}


def _flatten_step(step: Step) -> Arrays:
    """Returns a step as arrays by name."""
    import torch

    frames = list(step.frame_outputs)
    entries = list(step.frame_outputs.values())

    def stacked(name: str) -> Any:
        return torch.stack([entry[name] for entry in entries]).float().numpy()

    scores = [float(entry.get("eff_iou_score", np.nan)) for entry in entries]
    return {
        "frame": np.array([step.frame]),
        "frames": np.array(frames),
        "conditioning": np.array(step.conditioning),
        "memories": to_bfloat16(stacked("maskmem_features")),
        "pointers": stacked("obj_ptr"),
        "object_logits": stacked("object_score_logits"),
        "scores": np.array(scores, np.float32),
        "masks": step.masks[:, 0].numpy(),
        "present": step.present[:, 0].numpy(),
        **{f"features/{number}": level.contiguous().numpy() for number, level in enumerate(step.features)},
        **{f"reference/{name}": tensor.numpy() for name, tensor in step.outputs.items()},
    }


def _steps(arrays: Arrays) -> list[RecordedStep]:
    steps: list[RecordedStep] = []
    while f"{_STEP}{len(steps)}/frame" in arrays:
        prefix = f"{_STEP}{len(steps)}/"
        steps.append(_step({name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}))
    return steps


def _step(arrays: Arrays) -> RecordedStep:
    count = len(arrays["present"])
    entries = {
        int(frame): MemoryEntry(
            memory, pointer, logits, np.zeros(count, np.float32), None if np.isnan(score) else score
        )
        for frame, memory, pointer, logits, score in zip(
            *(arrays[name] for name in ("frames", "memories", "pointers", "object_logits", "scores")), strict=True
        )
    }
    conditioning = tuple(map(int, arrays["conditioning"]))
    return RecordedStep(
        frame=int(arrays["frame"][0]),
        features=dict(
            zip(("high_res_0", "high_res_1", "features"), (arrays[f"features/{n}"] for n in range(3)), strict=True)
        ),
        bank=MemoryBank(
            tuple(range(count)),
            Retention.EVERYTHING,
            conditioning={frame: entries[frame] for frame in conditioning},
            tracked={frame: entry for frame, entry in sorted(entries.items()) if frame not in conditioning},
            first_frame=min(conditioning),
        ),
        masks=arrays["masks"],
        present=arrays["present"],
        reference={name: arrays[f"reference/{name}"] for name in STEP},
        oracle={name: arrays[f"oracle/{name}"] for name in STEP},
    )
