"""A folder of a compiled model in which some files are those of another compile: a copy was cut short."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import torch

from conformance.calibration.faults import picked
from conformance.support import recurrent_segmenter
from conformance.support.recurrent_step import Step
from harness.compiler.deployment.compiling import compile_into
from harness.compiler.deployment.deployable import ArtifactSpec, Deployable, ModelOptions
from harness.compiler.targets import HOST
from harness.core.case import Case
from harness.core.program import Arrays, Program
from harness.core.settings import SEEDED, Settings
from harness.runtime.artifact import Artifact
from harness.runtime.manifest import LIBRARY, MANIFEST, weights_file

_CHANGING = (LIBRARY, weights_file("step"), MANIFEST)
"""Files that differ between two compiles; the others are copies of TVM's libraries."""
MIXTURES = [files for count in (1, 2, 3) for files in combinations(_CHANGING, count)]
"""Files that another compile has left; all of them are another model, which is in order but computes something else."""


class _Later(Step):
    """The same model after its code was changed."""

    def forward(self, frame: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, remembered = super().forward(frame, memory)
        return logits + 1, remembered


def _later_programs(case: Case, settings: Settings, _options: object = None) -> Iterator[Program]:
    (program,) = recurrent_segmenter.programs(case, settings)
    step = _Later(case.seed).eval().requires_grad_(False)
    yield Program("step", step, program.example, program.outputs, uses_rope=True)


@cache
def _compiled(*, later: bool) -> Path:
    """Compiles the model of the component `clip`, or a later one with other weights, once for each process."""
    folder = Path(tempfile.mkdtemp(prefix="sam3-tvm-calibration-"))
    deployable = Deployable(recurrent_segmenter.NAME, _later_programs if later else recurrent_segmenter.programs)
    case = Case("clip", "lowering", HOST.name, seed=int(later))
    compile_into(ArtifactSpec(deployable, case, SEEDED, ModelOptions()), folder)
    return folder


def mixed(part: float, folder: Path) -> tuple[str, ...]:
    """Fills a folder with a compiled model, some of whose files are those of another; returns the names of these.

    Args:
        part: Which files: a part of 1.
        folder: Where to.
    """
    files: tuple[str, ...] = picked(MIXTURES, part)
    for path in _compiled(later=False).iterdir():
        shutil.copyfile((_compiled(later=True) if path.name in files else path.parent) / path.name, folder / path.name)
    return files


def run(folder: Path, example: dict[str, torch.Tensor]) -> Arrays:
    """Loads a folder as a user does, and returns what it computes.

    Raises:
        ModelError: It is refused.
    """
    artifact = Artifact.load(folder)
    found = artifact.call("step", **{name: value.numpy() for name, value in example.items()})
    return {name: artifact.fetch(tensor).copy() for name, tensor in found.items()}
