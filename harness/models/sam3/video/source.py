"""What upstream answers to a question about a video, and what each step of its tracker computes; cached on disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case import Case
from harness.core.program import Arrays
from harness.core.settings import Settings
from harness.models.sam3.source import BUILT_BY, ORACLE, SHARED, build, cache_key, shared_trunk
from harness.models.sam3.video import STEP
from harness.models.sam3.video.questions import Pixels, Question, frames_of
from harness.models.sam3.video.sessions.scripts import Script
from harness.runtime.sam3.video.bfloat16 import to_bfloat16
from harness.runtime.sam3.video.memory_bank import MemoryBank, MemoryEntry
from harness.runtime.sam3.video.memory_selection import Retention

if TYPE_CHECKING:
    from harness.models.sam3.video.upstream import Remembered, Step

_UPSTREAM = "harness.models.sam3.video.upstream"
_SESSIONS = "harness.models.sam3.video.sessions.upstream"
_EXACT, _STEP = "float64:", "step "
"""What the names of the oracle's arrays and of those of a step begin with."""
_TRACKED = ("logits", "object_logits", "memories")
"""What is kept of the run in float64."""


@dataclass(frozen=True, eq=False)
class AskedStep:
    """A step of a bucket of B objects, with the state that PyTorch was in.

    Attributes:
        frame: The frame.
        features: fp32 arrays of the frame: `high_res_0`, `high_res_1` and `features`.
        bank: What upstream remembers.
        masks: fp32 [B, 1152, 1152], the logits that the frame's memory is encoded of.
        present: fp32 [B], the object logits that it is encoded with.
        reference: What upstream computes, by the names in `harness.models.sam3.video.STEP`.
        oracle: The same in float64.
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
    """What upstream answers.

    Attributes:
        question: What was asked.
        reference: By answer and name: `0/…` is of the prompt, `1/…` of the prompt's frame, and so on, with the names in
            `harness.models.sam3.video.upstream.PARTS`; fp32 on the CPU.
        exact: `logits`, `object_logits` and `memories` in float64; None where the question is asked in fp32 alone.
        steps: The steps that get PyTorch's state.
    """

    question: Question
    reference: Arrays
    exact: Arrays | None
    steps: tuple[AskedStep, ...]


class VideoSource:
    """Upstream's answers for a case; to be used inside `harness.models.sam3.upstream.upstream()`."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """Does nothing yet; the model is built when the first answer is not in the cache.

        Raises:
            HarnessError: The cache cannot be used.
        """
        from harness.files import cache_root
        from harness.parity.cache import ArrayCache

        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._model: Any = None

    def answer(self, question: Question, actual: Arrays) -> Answer:
        """Upstream's answer to a question.

        Where rounding decides which objects a frame's memory has, and the compiled model decided otherwise, upstream is
        asked again and decides as it did: all that follows is then held to what follows from the same decisions.

        Args:
            question: The question.
            actual: What the compiled model answers; `1/remembered` and so on are read.

        Raises:
            HarnessError: Checkpoint, video or cache cannot be used.
        """
        answer = self._answer(question, None)
        if rounding_decides_first(actual, answer.reference):
            answer = self._answer(question, _remembered(question, actual))
        return answer

    def _answer(self, question: Question, followed: Remembered | None) -> Answer:
        from harness.parity.cache import arrays_digest

        frames = frames_of(question)
        key = self._key(question, frames)
        if followed is not None:
            key |= {"followed": arrays_digest({str(frame): each for frame, each in followed.items()})}
        arrays = self._cache.get_or_make(key, lambda: self._asked(question, frames, followed))
        exact = {name.removeprefix(_EXACT): array for name, array in arrays.items() if name.startswith(_EXACT)}
        reference = {name: array for name, array in arrays.items() if not name.startswith((_EXACT, _STEP))}
        return Answer(question, reference, exact or None, tuple(_steps(arrays)))

    def session(self, script: Script) -> Arrays:
        """Upstream's answers to the requests of a session, as `harness.models.sam3.video.sessions.upstream` has them.

        Raises:
            HarnessError: Checkpoint, video or cache cannot be used.
        """
        frames = frames_of(script)
        return self._cache.get_or_make(self._key(script, frames), lambda: self._session(script, frames))

    def _key(self, asked: Question | Script, frames: tuple[Pixels, ...]) -> dict[str, Any]:
        from harness.parity.cache import arrays_digest

        kind, module = ("video answer", _UPSTREAM) if isinstance(asked, Question) else ("video session", _SESSIONS)
        seen = arrays_digest({str(number): frame for number, frame in enumerate(frames)})
        said = f"{asdict(replace(asked, video=Path(asked.video.name)))!r} {seen}"
        return cache_key(kind, self._case, self._settings, [], said, (BUILT_BY, module, SHARED, ORACLE))

    def _session(self, script: Script, frames: tuple[Pixels, ...]) -> Arrays:
        from harness.models.sam3.video.sessions.upstream import answers

        model = self._built()
        with shared_trunk(model, self._cache, self._case, self._settings):
            return answers(model, script, frames)

    def _asked(self, question: Question, frames: tuple[Pixels, ...], followed: Remembered | None) -> Arrays:
        from harness.models.sam3.video.upstream import Tracking
        from harness.parity.oracle import oracle, reference

        model = self._built()
        tracking = Tracking(model, question, frames, followed=followed)
        with shared_trunk(model, self._cache, self._case, self._settings):
            arrays = dict(reference(tracking, (), tracking.names))
            if question.float64:
                decided = _remembered(question, arrays)
                again = Tracking(model, replace(question, steps=()), frames, tracking.found, decided)
                exact = oracle(again, (), again.names)
                arrays |= {f"{_EXACT}{name}": exact[name] for name in exact if name.endswith(_TRACKED)}
        for name in [name for name in arrays if name.endswith("/memories")]:
            arrays[name] = to_bfloat16(arrays[name].astype(np.float32))  # exactly, since it is rounded
        for number, step in enumerate(tracking.steps):
            computed = oracle(step.module, (), STEP)
            arrays |= {f"{_STEP}{number}/{name}": array for name, array in (_flat(step) | _prefixed(computed)).items()}
        return arrays

    def _built(self) -> Any:
        from harness.models.sam3.build import build_video_model

        if self._model is None:
            image_model = build(self._case, self._settings, interactive=True)
            self._model = build_video_model(image_model, self._case.scale)
        return self._model


def rounding_decides_first(actual: Arrays, reference: Arrays) -> bool:
    """Whether the first frame whose memory has other objects than upstream's differs only where rounding decides it."""
    for name in (name for name in reference if name.endswith("/remembered")):
        ours, theirs = actual.get(name, reference[name]), reference[name]
        if not np.array_equal(ours, theirs):
            undecided = reference[name.replace("remembered", "undecided")]
            return len(ours) == len(theirs) and not (ours != theirs)[~undecided].any()
    return False


def _remembered(question: Question, arrays: Arrays) -> Remembered:
    """By frame, which objects its memory has, of arrays by answer: the answer 1 is of the prompt's frame."""
    answers = range(1, question.length - question.frame + 1)
    return {question.frame + number - 1: arrays[f"{number}/remembered"] for number in answers}


def _prefixed(oracle: Arrays) -> Arrays:
    return {f"oracle/{name}": array for name, array in oracle.items()}


def _flat(step: Step) -> Arrays:
    """A step as arrays by name."""
    import torch

    frames = list(step.remembered)
    entries = list(step.remembered.values())

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


def _steps(arrays: Arrays) -> list[AskedStep]:
    steps: list[AskedStep] = []
    while f"{_STEP}{len(steps)}/frame" in arrays:
        prefix = f"{_STEP}{len(steps)}/"
        steps.append(_step({name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}))
    return steps


def _step(arrays: Arrays) -> AskedStep:
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
    return AskedStep(
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
