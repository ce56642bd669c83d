"""Defines SAM 3 for deployment: entry points, image functions and the tokenizer's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from harness.compiler.deployment.deployable import Deployable
from harness.core.weights import WEIGHTS
from harness.models.sam3.deployed.entry_points.grounding import GROUNDING
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.image_functions import IMAGE_FUNCTIONS
from harness.runtime.sam3 import VOCABULARY_FILE


def _upstream() -> AbstractContextManager[None]:
    from harness.models.sam3.upstream import upstream

    return upstream()


def _files() -> Mapping[str, Path]:
    from harness.models.sam3.vocabulary import vocabulary_path

    return {VOCABULARY_FILE: vocabulary_path()}


def _has_point_prompts(checkpoint: Path) -> bool:
    from harness.models.sam3.checkpoints import has_point_prompts

    return has_point_prompts(checkpoint)


def _has_tracker(checkpoint: Path | None) -> bool:
    from harness.models.sam3.checkpoints import has_tracker

    return checkpoint is None or has_tracker(checkpoint)


DEPLOYABLE = Deployable(
    model="sam3",
    programs=programs,
    context=_upstream,
    kernels=IMAGE_FUNCTIONS,
    files=_files,
    vocabulary=VOCABULARY_FILE,
    knows_points=_has_point_prompts,
    knows_clicks=_has_tracker,
    grounding=tuple(entry_point.name for entry_point in GROUNDING),
    weights=WEIGHTS,
)
"""The whole model, which `sam3-tvm compile` writes into a folder."""
