"""Builds SAM 3.1 around upstream's SAM 3, and draws or loads its weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.settings import Settings
from harness.models.sam3 import build as sam3
from harness.models.sam3.scales import SCALES
from harness.models.sam3.upstream import upstream
from harness.models.sam31.checkpoint import Sam31Checkpoint

if TYPE_CHECKING:
    from harness.models.sam31.architecture import Sam31

ATTENTION_LAYERS = 4
"""Layers of the memory attention of the published model."""


def build_architecture(scale: str, *, interactive: bool = True) -> Sam31:
    """Builds the model without weights, as `harness.models.sam3.build.build_architecture` does; it has every part."""
    with upstream():
        detector = sam3.build_architecture(scale)
        with sam3.building(scale):
            from harness.models.sam31.architecture import Sam31

            overridden = SCALES[scale].get("TransformerEncoderCrossAttention", {})
            model = Sam31(detector, overridden.get("num_layers", ATTENTION_LAYERS))
        sam3.fill_position_cache(model.memory_encoder.position_encoding, sam3.MEMORY_SIZES)
    return model.eval().requires_grad_(False)


def build_case(case: Case, settings: Settings, *, interactive: bool = True) -> Sam31:
    """Builds the model of a case with its weights, as `harness.models.sam3.build.build_case` does."""
    model = build_architecture(case.scale, interactive=interactive)
    give_weights(model, case, settings)
    return model


def image_model(model: Sam31) -> Any:
    """Returns what upstream's `Sam3Processor` and `predict_inst` are called with: the detector, with a head for clicks.

    To be used inside `upstream()`.
    """
    from sam3.model.sam1_task_predictor import SAM3InteractiveImagePredictor

    from harness.models.sam31.clicks import ClickTracker

    detector = model.detector
    detector.inst_interactive_predictor = SAM3InteractiveImagePredictor(ClickTracker(model)).eval()
    return detector


give_weights = partial(sam3.give_weights, kind=Sam31Checkpoint)
"""Draws or loads the weights of a model, as `harness.models.sam3.build.give_weights` does."""
