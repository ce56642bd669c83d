"""Computes upstream's answer to each round of each question, twice, and in float64; one cache entry per question.

In half precision each round gets the mask that it refines (`harness.models.sam3.interactive.refining`). Masks are no
part of such an answer: they are decided on logits in fp32, and held to upstream's decision on the same logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.precision import PRECISIONS
from harness.core.program import Arrays
from harness.core.settings import Settings
from harness.models.sam3.interactive.questions import Question, load_questions
from harness.models.sam3.source import ORACLE, SHARED, build, cache_key, shared_trunk
from harness.parity.references import reference_of, run_twice, split_runs

if TYPE_CHECKING:
    from harness.parity.trace import RunModule

_UPSTREAM = "harness.models.sam3.interactive.upstream"
_REFINING = "harness.models.sam3.interactive.refining"
_BUILD = "harness.models.sam3.build"
_EXACT = "oracle:"
"""Prefix of the names of the oracle's arrays in the cache."""
NUMBERS = ("logits", "iou")
"""Outputs that are floats; masks are decisions on them."""
PARTS = (*NUMBERS, "masks", "undecided")
"""Names of the outputs of `harness.models.sam3.interactive.upstream.InteractivePrediction` for each round."""


@dataclass(frozen=True)
class Answer:
    """Upstream's answer in one round.

    Attributes:
        name: Name in reports.
        size: Width and height of the photograph.
        reference, rerun: The arrays `PARTS` of two runs, fp32 on the CPU; `NUMBERS` alone in half precision.
        oracle: `NUMBERS` in float64; None for a question that is asked in fp32 alone.
        refined: In half precision, the logits [288, 288] that the round refines, if any.
    """

    name: str
    size: tuple[int, int]
    reference: Arrays
    rerun: Arrays
    oracle: Arrays | None
    refined: npt.NDArray[np.float32] | None = None


class InteractiveSource:
    """The questions of a case and upstream's answers; to be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        questions: The questions, in half precision only those with `float64`; questions about one photograph follow
            each other.
    """

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; the model is built for the first answer that is not in the cache.

        Raises:
            HarnessError: Questions or cache cannot be used.
        """
        from harness.core.files import cache_root
        from harness.parity.cache import ArrayCache

        self._half = PRECISIONS[case.precision].is_half
        questions = load_questions(image=settings.image)
        self.questions = tuple(question for question in questions if question.float64 or not self._half)
        self._reference = reference_of(PRECISIONS[case.precision])
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._model: Any = None
        self._encoded: dict[str, tuple[Any, ...]] = {}
        self._image: Path | None = None

    def answers(self, question: Question) -> Iterator[Answer]:
        """Yields upstream's answers to one question, one for each round.

        Raises:
            HarnessError: Checkpoint, photograph or cache cannot be used.
        """
        from harness.runtime.sam3.images import load_image

        parts, compute = (NUMBERS, self._compute_half) if self._half else (PARTS, self._compute)
        arrays = self._cache.get_or_make(self._key(question), lambda: compute(question))
        exact = {name.removeprefix(_EXACT): arrays.pop(name) for name in list(arrays) if name.startswith(_EXACT)}
        first, rerun = split_runs(arrays)
        size = load_image(question.image).size
        refined = None
        for name in question.answers:
            oracle = {part: exact[f"{name}/{part}"] for part in NUMBERS} if question.float64 else None
            reference, second = ({part: run[f"{name}/{part}"] for part in parts} for run in (first, rerun))
            yield Answer(name, size, reference, second, oracle, refined)
            refined = _best(reference) if self._half else None

    def _key(self, question: Question) -> dict[str, Any]:
        question_text = repr(asdict(replace(question, image=Path(question.image.name))))
        code = [_BUILD, _UPSTREAM, SHARED, ORACLE, self._reference.code]
        kind = "interactive answer"
        if self._half:
            kind, code = f"{kind} {self._reference.kind}", [*code, _REFINING]
        return cache_key(kind, self._case, self._settings, [question.image], question_text, code)

    def _compute(self, question: Question) -> Arrays:
        from harness.models.sam3.interactive.upstream import InteractivePrediction
        from harness.parity.oracle import oracle
        from harness.runtime.sam3.images import load_image

        features = self._features(question)
        module = InteractivePrediction(self._model, question, load_image(question.image).size)
        names = [f"{answer}/{part}" for answer in question.answers for part in PARTS]
        arrays = run_twice(lambda: dict(self._reference.run(module, features["reference"], names)))
        if not question.float64:
            return arrays
        exact = oracle(module, features["oracle"], names)
        return arrays | {f"{_EXACT}{name}": exact[name] for name in names if name.endswith(PARTS[:2])}

    def _compute_half(self, question: Question) -> Arrays:
        from harness.models.sam3.interactive.refining import Refinement
        from harness.parity.oracle import oracle
        from harness.runtime.sam3.images import load_image

        features, size = self._features(question), load_image(question.image).size

        def rounds(run: RunModule, kind: str, source_answers: Arrays | None = None) -> Arrays:
            """Runs all rounds, each on the best mask of the round before in `source_answers` or in its own answers."""
            answers: Arrays = {}
            refined = None
            for number, name in enumerate(question.answers):
                names = [f"{name}/{part}" for part in NUMBERS]
                answers |= run(Refinement(self._model, question, size, number, refined), features[kind], names)
                earlier_answers = answers if source_answers is None else source_answers
                refined = _best({part: earlier_answers[f"{name}/{part}"] for part in NUMBERS})
            return answers

        arrays = run_twice(lambda: rounds(self._reference.run, "reference"))
        exact = rounds(oracle, "oracle", arrays)
        return arrays | {f"{_EXACT}{name}": array for name, array in exact.items()}

    def _features(self, question: Question) -> dict[str, tuple[Any, ...]]:
        """Returns the features of `Encoding` in fp32 and float64; those of the last photograph are cached."""
        import torch

        from harness.models.sam3.interactive.upstream import LEVELS, Encoding
        from harness.parity.oracle import oracle
        from harness.runtime.sam3.images import load_image

        if self._image == question.image:
            return self._encoded
        if self._model is None:
            self._model = build(self._case, self._settings, interactive=True)
        pixels = torch.from_numpy(np.array(load_image(question.image))).permute(2, 0, 1)
        names = [str(level) for level in range(LEVELS)]
        runs = {"reference": self._reference.run} | ({"oracle": oracle} if question.float64 else {})
        self._encoded = {}
        for kind, run in runs.items():
            # The cached trunk results are fp32 or float64; under autocast the trunk returns others for the same input.
            uncached = self._half and kind == "reference"
            with nullcontext() if uncached else shared_trunk(self._model, self._cache, self._case, self._settings):
                arrays = run(Encoding(self._model), (pixels,), names)
            self._encoded[kind] = tuple(map(torch.from_numpy, arrays.values()))
        self._image = question.image
        return self._encoded


def _best(answer: Arrays) -> npt.NDArray[np.float32]:
    """Returns the logits [288, 288] of the mask with the highest predicted IoU."""
    best: npt.NDArray[np.float32] = answer["logits"][int(answer["iou"].argmax())]
    return best
