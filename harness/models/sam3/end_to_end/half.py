"""What upstream answers in half precision, and what its `Sam3Processor` makes of the answers of a compiled model.

A half-precision answer is judged in two steps. The raw outputs are held to float64 beside upstream under autocast, by
the oracle verdict. What is found is a decision on these outputs, made in fp32 whatever the precision: it is held, by
the criteria of `harness.parity.detections`, to what upstream's processor decides on the very same raw outputs. A score
or a pixel near its threshold may fall on either side in half precision, upstream's too, so decisions of two models are
not compared.

Feature maps are float32 between encoding and asking, on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case import Case
from harness.core.precision import PRECISIONS
from harness.core.settings import REPOSITORY, Settings
from harness.models.sam3.end_to_end import RAW
from harness.models.sam3.end_to_end.questions import Question
from harness.models.sam3.end_to_end.source import OUTPUTS, Answer, EndToEndSource
from harness.models.sam3.source import CODE, Arrays, build, cache_key, first_and_again, run_twice
from harness.parity.detections import Found, Truth

if TYPE_CHECKING:
    import torch

_CODE = (*CODE, REPOSITORY / "harness" / "parity" / "autocast.py")


class HalfEndToEndSource(EndToEndSource):
    """The questions that float64 is asked too, with upstream's raw outputs under autocast as reference."""

    def __init__(self, case: Case, settings: Settings) -> None:
        """See `EndToEndSource`."""
        super().__init__(case, settings)
        self.questions = tuple(question for question in self.questions if question.float64)
        self._precision = PRECISIONS[case.precision]
        self._encoded_half: tuple[Path, list[list[torch.Tensor]]] | None = None

    def answers(self, question: Question) -> Iterator[Answer]:
        """Upstream's answers; the oracle is that of fp32, `truth` is what upstream finds in fp32."""
        prompt = repr(replace(question, image=Path(question.image.name)))
        kind = f"answer {self._precision.name}"
        key = cache_key(kind, self._case, self._settings, question.image, prompt, _CODE)
        first, again = first_and_again(self._cache.get_or_make(key, lambda: self._asked_half(question)))
        for index, answer in enumerate(super().answers(question)):
            rows = slice(index, index + 1)
            yield replace(
                answer,
                reference={name: first[name][rows] for name in RAW},
                again={name: again[name][rows] for name in RAW},
            )

    def _asked_half(self, question: Question) -> Arrays:
        from harness.models.sam3.end_to_end.upstream import Asking
        from harness.parity.autocast import half_reference
        from harness.runtime.sam3.images import load_image

        features = iter(self._features(question.image))
        # No score is above 1: nothing needs to be decided.
        asking = Asking(self._model, question, load_image(question.image).size, threshold=1.0)

        def run() -> Arrays:
            arrays = half_reference(asking, next(features), OUTPUTS, self._precision)
            return {name: arrays[name] for name in RAW}

        return run_twice(run)

    def _features(self, image: Path) -> list[list[torch.Tensor]]:
        """What `Encoding` makes of a photograph under autocast, in two runs."""
        import torch

        from harness.models.sam3.end_to_end.upstream import LEVELS, Encoding
        from harness.parity.autocast import half_reference
        from harness.runtime.sam3.images import load_image

        if self._encoded_half is None or self._encoded_half[0] != image:
            self._encoded_half = None
            if self._model is None:
                self._model = build(self._case, self._settings)
            pixels = torch.from_numpy(np.array(load_image(image))).permute(2, 0, 1)
            names = [str(number) for number in range(2 * LEVELS)]
            runs = [half_reference(Encoding(self._model), (pixels,), names, self._precision) for _ in range(2)]
            self._encoded_half = image, [[torch.from_numpy(array) for array in run.values()] for run in runs]
        return self._encoded_half[1]


class _Answered:
    """In the place of upstream's model, with an answer that is known."""

    def __init__(self, raw: Arrays) -> None:
        self._raw = raw
        self.backbone = self

    def forward_text(self, _texts: list[str], device: str) -> dict[str, Any]:
        return {}

    def _get_dummy_prompt(self) -> None:
        return None

    def forward_grounding(self, **_arguments: Any) -> dict[str, torch.Tensor]:
        import torch

        names = ("pred_logits", "pred_boxes", "pred_masks", "presence_logit_dec", "semantic_seg")
        return {name: torch.from_numpy(self._raw[raw]) for name, raw in zip(names, RAW, strict=True)}


def decided(raw: Arrays, size: tuple[int, int]) -> Truth:
    """What upstream's `Sam3Processor` finds, given raw outputs; to be used inside `upstream()`.

    Args:
        raw: The outputs `RAW` of one answer, fp32.
        size: Width and height of the photograph.
    """
    from harness.models.sam3.end_to_end.upstream import Asking
    from harness.parity.oracle import reference

    asking = Asking(_Answered(raw), Question("", Path(), texts=("visual",)), size)
    arrays = reference(asking, (), OUTPUTS)
    found = Found(arrays["queries"][0], arrays["pixel_masks"], arrays["pixel_boxes"], arrays["scores"])
    return Truth(found, found, arrays["undecided"])
