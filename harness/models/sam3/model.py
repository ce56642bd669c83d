"""SAM 3 as a model that the harness verifies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from harness.deployment.deployable import Deployable
from harness.models.model import Model
from harness.models.sam3.deployed.entry_points import IMAGE_FUNCTIONS, programs
from harness.models.sam3.subjects import NAME, SUBJECTS
from harness.runtime.sam3.tokenizer import VOCABULARY_FILE


def _upstream() -> AbstractContextManager[None]:
    from harness.models.sam3.upstream import upstream

    return upstream()


def _import() -> None:
    from tqdm import tqdm

    from harness.models.sam3.source import Source  # noqa: F401
    from harness.models.sam3.upstream import import_sam3

    tqdm.monitor_interval = 0  # its bars, which the import makes, would start a thread
    import_sam3()


def _files() -> Mapping[str, Path]:
    from harness.models.sam3.vocabulary import vocabulary_path

    return {VOCABULARY_FILE: vocabulary_path()}


def _knows_points(checkpoint: Path) -> bool:
    from harness.models.sam3.checkpoints import has_point_prompts

    return has_point_prompts(checkpoint)


DEPLOYABLE = Deployable(
    model=NAME,
    programs=programs,
    context=_upstream,
    kernels=IMAGE_FUNCTIONS,
    files=_files,
    vocabulary=VOCABULARY_FILE,
    knows_points=_knows_points,
)
"""The whole model, as `sam3-tvm compile` makes a folder of it."""

MODEL = Model(name=NAME, subjects=SUBJECTS, deployable=DEPLOYABLE, context=_upstream, prepare=_import)
