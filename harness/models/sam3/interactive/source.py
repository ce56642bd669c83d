"""What upstream answers to each round of each question, twice, and in float64; cached on disk, one entry a question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.case import Case
from harness.core.precision import PRECISIONS
from harness.core.settings import Settings
from harness.core.subject import Arrays
from harness.models.sam3.interactive.questions import Question, load_questions
from harness.models.sam3.source import ORACLE, SHARED, build, cache_key, shared_trunk
from harness.parity.references import first_and_again, reference_of, run_twice

_UPSTREAM = "harness.models.sam3.interactive.upstream"
_BUILD = "harness.models.sam3.build"
_EXACT = "oracle:"
"""Prefix under which the oracle's arrays are kept."""
PARTS = ("logits", "iou", "masks", "undecided")
"""Names of what `harness.models.sam3.interactive.upstream.Predicting` returns for each round."""


@dataclass(frozen=True)
class Answer:
    """What upstream answers in one round.

    Attributes:
        name: What it is called in reports.
        reference, again: The arrays `PARTS` of two runs, fp32 on the CPU.
        oracle: `logits` and `iou` in float64; None where the question is asked in fp32 alone.
    """

    name: str
    reference: Arrays
    again: Arrays
    oracle: Arrays | None


class InteractiveSource:
    """The questions of a case and upstream's answers; to be used inside `harness.models.sam3.upstream.upstream()`.

    Attributes:
        questions: What is asked; questions about one photograph follow each other.
    """

    def __init__(self, case: Case, settings: Settings) -> None:
        """Reads the questions; the model is built when the first answer is not in the cache.

        Raises:
            HarnessError: Questions or cache cannot be used.
        """
        from harness.files import cache_root
        from harness.parity.cache import ArrayCache

        self.questions = load_questions(image=settings.image)
        self._reference = reference_of(PRECISIONS[case.precision])
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._model: Any = None
        self._encoded: dict[str, tuple[Any, ...]] = {}
        self._image: Path | None = None

    def answers(self, question: Question) -> Iterator[Answer]:
        """Upstream's answers to one question, one for each round.

        Raises:
            HarnessError: Checkpoint, photograph or cache cannot be used.
        """
        arrays = self._cache.get_or_make(self._key(question), lambda: self._asked(question))
        exact = {name.removeprefix(_EXACT): arrays.pop(name) for name in list(arrays) if name.startswith(_EXACT)}
        first, again = first_and_again(arrays)
        for name in question.answers:
            oracle = {part: exact[f"{name}/{part}"] for part in PARTS[:2]} if question.float64 else None
            reference, second = ({part: run[f"{name}/{part}"] for part in PARTS} for run in (first, again))
            yield Answer(name, reference, second, oracle)

    def _key(self, question: Question) -> dict[str, Any]:
        asked = repr(asdict(replace(question, image=Path(question.image.name))))
        code = (_BUILD, _UPSTREAM, SHARED, ORACLE, self._reference.code)
        return cache_key("interactive answer", self._case, self._settings, [question.image], asked, code)

    def _asked(self, question: Question) -> Arrays:
        from harness.models.sam3.interactive.upstream import Predicting
        from harness.parity.oracle import oracle
        from harness.runtime.sam3.images import load_image

        features = self._features(question)
        module = Predicting(self._model, question, load_image(question.image).size)
        names = [f"{answer}/{part}" for answer in question.answers for part in PARTS]
        both = run_twice(lambda: dict(self._reference.run(module, features["reference"], names)))
        if not question.float64:
            return both
        exact = oracle(module, features["oracle"], names)
        return both | {f"{_EXACT}{name}": exact[name] for name in names if name.endswith(PARTS[:2])}

    def _features(self, question: Question) -> dict[str, tuple[Any, ...]]:
        """What `Encoding` makes of a photograph, in fp32 and in float64; that of the last photograph is kept."""
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
        with shared_trunk(self._model, self._cache, self._case, self._settings):
            self._encoded = {
                kind: tuple(map(torch.from_numpy, run(Encoding(self._model), (pixels,), names).values()))
                for kind, run in runs.items()
            }
        self._image = question.image
        return self._encoded
