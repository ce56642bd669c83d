"""Defines SAM 3 for deployment: entry points, image functions and the tokenizer's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from harness.compiler.deployment.deployable import Deployable
from harness.core.case import WEIGHTS
from harness.models.sam3.deployed.entry_points.programs import programs
from harness.models.sam3.deployed.image_functions import IMAGE_FUNCTIONS
from harness.models.sam3.deployed.options import Sam3Options
from harness.runtime.sam3 import VOCABULARY_FILE
from harness.runtime.sam3.description import NAME


def _upstream() -> AbstractContextManager[None]:
    from harness.models.sam3.upstream import upstream

    return upstream()


def _files() -> Mapping[str, Path]:
    from harness.models.sam3.vocabulary import vocabulary_path

    return {VOCABULARY_FILE: vocabulary_path()}


DEPLOYABLE = Deployable(
    model=NAME,
    programs=programs,
    context=_upstream,
    kernels=IMAGE_FUNCTIONS,
    files=_files,
    options=Sam3Options,
    weights=WEIGHTS,
)
"""The whole model, which `sam3-tvm compile` writes into a folder."""
