"""Computes upstream's answer to each question, twice, and in float64; one cache entry per question.

A half-precision answer is judged in two steps. The raw outputs are held to float64 and to upstream under autocast, by
the oracle verdict. The detections are decisions on these outputs, made in fp32 in every precision. They are held, by
the criteria of `harness.models.sam3.detections`, to the detections of upstream's processor on the same raw outputs
(`decide_detections`). In half precision a score or a pixel near its threshold may fall on either side, upstream's too,
so decisions of two models are not compared. On both sides feature maps are float32 between encoding and the question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.core.program import Arrays
from harness.core.settings import Settings
from harness.models.sam3.captures import GROUNDING
from harness.models.sam3.detections import Detections, ReferenceDetections
from harness.models.sam3.end_to_end import RAW
from harness.models.sam3.end_to_end.questions import Question, load_questions
from harness.models.sam3.source import BUILDER, ORACLE, SHARED, build, cache_key, shared_trunk
from harness.parity.references import Reference, reference_of, run_twice, split_runs

if TYPE_CHECKING:
    import torch

OUTPUTS = (*RAW, "queries", "pixel_masks", "undecided", "pixel_boxes", "scores")
"""Names of the outputs of `harness.models.sam3.end_to_end.upstream.Grounding`."""
_BITS = ("pixel_masks", "undecided")
_EXACT = "oracle:"
"""Prefix of the oracle's arrays in the cache, stored as fp32 differences from the first run to halve their size."""
_UPSTREAM = "harness.models.sam3.end_to_end.upstream"
_FP32 = reference_of(PRECISIONS[DEFAULT_PRECISION])


@dataclass(frozen=True)
class Answer:
    """Upstream's answer to one text or prompt.

    Attributes:
        name: Name in reports.
        reference, rerun: Raw outputs, fp32 on the CPU, of two runs.
        oracle: Raw outputs in float64; None for a question that is asked in fp32 alone.
        truth: Upstream's detections in the photograph.
    """

    name: str
    reference: Arrays
    rerun: Arrays
    oracle: Arrays | None
    truth: ReferenceDetections


@dataclass(frozen=True)
class _EncodedPhotograph:
    """A photograph: its size, and the features of `Encoding` in two runs and, where it is needed, in float64."""

    image: Path
    size: tuple[int, int]
    runs: tuple[list[torch.Tensor], ...]
    exact: list[torch.Tensor] | None


class EndToEndSource:
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

        precision = PRECISIONS[case.precision]
        questions = load_questions(image=settings.image)
        self.questions = tuple(question for question in questions if question.float64 or not precision.judged_by_oracle)
        self._reference = reference_of(precision)
        self._case = case
        self._settings = settings
        self._cache = ArrayCache(cache_root())
        self._model: Any = None
        self._photograph: _EncodedPhotograph | None = None
        self._half_features_cache: tuple[Path, list[list[torch.Tensor]]] | None = None

    def answers(self, question: Question) -> Iterator[Answer]:
        """Yields upstream's answers to one question, one for each text of a batch.

        Raises:
            HarnessError: Checkpoint, photograph or cache cannot be used.
        """
        from harness.runtime.sam3.images import load_image

        arrays = self._cache.get_or_make(self._key("answer", question, _FP32), lambda: self._compute(question))
        exact: Arrays = {}
        if question.float64:
            exact = {name: arrays.pop(f"{_EXACT}{name}") + arrays[name].astype(np.float64) for name in RAW}
        first, rerun = split_runs(arrays)
        raw, raw_rerun = self._raw(question, first, rerun)
        size = load_image(question.image).size
        for index, name in enumerate(question.answers):
            truth = ReferenceDetections(
                _detections(first, size, index), _detections(rerun, size, index), _rows(first, "undecided", size, index)
            )
            oracle = _raw(exact, index) if question.float64 else None
            if oracle is not None:
                kept_queries = truth.first.queries
                scores = _sigmoid(oracle["logits"])[0, :, 0] * _sigmoid(oracle["presence"])[0]
                truth = replace(truth, boxes=_pixels(oracle["boxes"], size)[kept_queries], scores=scores[kept_queries])
            yield Answer(name, _raw(raw, index), _raw(raw_rerun, index), oracle, truth)

    def _raw(self, question: Question, first: Arrays, rerun: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the raw outputs of two runs in the case's precision; `first` and `rerun` are those of fp32."""
        reference = self._reference
        if reference.kind == _FP32.kind:
            return first, rerun
        key = self._key(f"answer {reference.kind}", question, reference)
        return split_runs(self._cache.get_or_make(key, lambda: self._compute_half(question)))

    def _key(self, kind: str, question: Question, reference: Reference) -> dict[str, Any]:
        prompt = repr(asdict(replace(question, image=Path(question.image.name))))
        code = (GROUNDING.module, BUILDER, _UPSTREAM, SHARED, ORACLE, reference.code)
        return cache_key(kind, self._case, self._settings, (question.image,), prompt, code)

    def _compute_half(self, question: Question) -> Arrays:
        from harness.models.sam3.end_to_end.upstream import Grounding
        from harness.runtime.sam3.images import load_image

        image_features = iter(self._half_features(question.image))
        # No score is above 1: nothing needs to be decided.
        grounding = Grounding(self._model, question, load_image(question.image).size, threshold=1.0)

        def run() -> Arrays:
            arrays = self._reference.run(grounding, next(image_features), OUTPUTS)
            return {name: arrays[name] for name in RAW}

        return run_twice(run)

    def _half_features(self, image: Path) -> list[list[torch.Tensor]]:
        """Returns the features that `Encoding` makes of a photograph in the case's precision, in two runs."""
        import torch

        from harness.models.sam3.end_to_end.upstream import LEVELS, Encoding
        from harness.runtime.sam3.images import load_image

        if self._half_features_cache is None or self._half_features_cache[0] != image:
            self._half_features_cache = None
            if self._model is None:
                self._model = build(self._case, self._settings)
            pixels = torch.from_numpy(np.array(load_image(image))).permute(2, 0, 1)
            names = [str(number) for number in range(2 * LEVELS)]
            runs = [self._reference.run(Encoding(self._model), (pixels,), names) for _ in range(2)]
            self._half_features_cache = image, [[torch.from_numpy(array) for array in run.values()] for run in runs]
        return self._half_features_cache[1]

    def _compute(self, question: Question) -> Arrays:
        from harness.models.sam3.end_to_end.upstream import Grounding
        from harness.parity.oracle import oracle, reference

        encoded = self._encoded_photograph(question)
        features = iter(encoded.runs)

        def run() -> Arrays:
            arrays = reference(Grounding(self._model, question, encoded.size), next(features), OUTPUTS)
            return arrays | {name: np.packbits(arrays[name]) for name in _BITS}

        arrays_of_runs = run_twice(run)
        if not question.float64:
            return arrays_of_runs
        # No score is above 1: in float64 only the raw outputs are of interest.
        exact = oracle(Grounding(self._model, question, encoded.size, threshold=1.0), encoded.exact or (), OUTPUTS)
        return arrays_of_runs | {
            f"{_EXACT}{name}": (exact[name] - arrays_of_runs[name]).astype(np.float32) for name in RAW
        }

    def _encoded_photograph(self, question: Question) -> _EncodedPhotograph:
        photograph = self._photograph
        if photograph is None or photograph.image != question.image or (question.float64 and photograph.exact is None):
            # The features of two photographs would not fit into memory.
            photograph = self._photograph = None
            photograph = self._photograph = self._encode(question.image, question.float64)
        return photograph

    def _encode(self, image: Path, exact: bool) -> _EncodedPhotograph:
        import torch

        from harness.models.sam3.end_to_end.upstream import LEVELS, Encoding
        from harness.parity.oracle import oracle, reference
        from harness.runtime.sam3.images import load_image

        if self._model is None:
            self._model = build(self._case, self._settings)
        photograph = load_image(image)
        pixels = torch.from_numpy(np.array(photograph)).permute(2, 0, 1)
        names = [str(number) for number in range(2 * LEVELS)]
        module = Encoding(self._model)

        def tensors(arrays: Arrays) -> list[torch.Tensor]:
            return [torch.from_numpy(array) for array in arrays.values()]

        with shared_trunk(self._model, self._cache, self._case, self._settings):
            runs = tuple(tensors(reference(module, (pixels,), names)) for _ in range(2))
            wide = tensors(oracle(module, (pixels,), names)) if exact else None
        return _EncodedPhotograph(image, photograph.size, runs, wide)


def _raw(arrays: Arrays, index: int) -> Arrays:
    """Returns the raw outputs for one text."""
    return {name: arrays[name][index : index + 1] for name in RAW}


def _detections(arrays: Arrays, size: tuple[int, int], index: int) -> Detections:
    """Selects the detections of one text; arrays of a batch have the texts one after another."""
    rows = [_rows(arrays, name, size, index) for name in ("pixel_masks", "pixel_boxes", "scores")]
    return Detections(arrays["queries"][index], *rows)


def _rows(arrays: Arrays, name: str, size: tuple[int, int], index: int) -> npt.NDArray[Any]:
    """Selects the rows of one text's kept queries."""
    kept_counts = arrays["queries"].sum(axis=1)
    array = arrays[name]
    if name in _BITS:
        width, height = size
        shape = (int(kept_counts.sum()), height, width)
        array = np.unpackbits(array, count=int(np.prod(shape))).view(np.bool_).reshape(shape)
    start = int(kept_counts[:index].sum())
    return array[start : start + int(kept_counts[index])]


def _pixels(boxes: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[Any]:
    """Converts normalized (cx, cy, w, h) [1, 200, 4] to (x0, y0, x1, y1) in pixels [200, 4]."""
    center, extent = boxes[0, :, :2], boxes[0, :, 2:]
    return np.concatenate([center - extent / 2, center + extent / 2], axis=1) * (*size, *size)


def _sigmoid(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = 1 / (1 + np.exp(-x))
    return result


class _FixedAnswer:
    """A stand-in for upstream's model that returns known raw outputs."""

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


def decide_detections(raw: Arrays, size: tuple[int, int]) -> ReferenceDetections:
    """Returns the detections of upstream's `Sam3Processor` for raw outputs; to be used inside `upstream()`.

    Args:
        raw: The outputs `RAW` of one answer, fp32.
        size: Width and height of the photograph.
    """
    from harness.models.sam3.end_to_end.upstream import Grounding
    from harness.parity.oracle import reference

    grounding = Grounding(_FixedAnswer(raw), Question("", Path(), texts=("visual",)), size)
    arrays = reference(grounding, (), OUTPUTS)
    detections = Detections(arrays["queries"][0], arrays["pixel_masks"], arrays["pixel_boxes"], arrays["scores"])
    return ReferenceDetections(detections, detections, arrays["undecided"])
