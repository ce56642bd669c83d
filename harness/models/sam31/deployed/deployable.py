"""Defines SAM 3.1 for deployment: SAM 3's entry points, functions on images and vocabulary, around other modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from harness.core.case import Case, Weights
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.deployable import DEPLOYABLE as SAM_3
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam31.checkpoint import Sam31Checkpoint
from harness.runtime.sam3.description import SAM_3_1


class Sam31Options(Sam3Options):
    """The options of a compiled SAM 3.1, which are SAM 3's; it tracks with a fixed number of memories."""

    needs_symbolic_axes: ClassVar[bool] = False
    checkpoint_class: ClassVar[type[Sam31Checkpoint]] = Sam31Checkpoint


GROUNDING_ALONE = Sam31Options(clicks=0)
"""The options of a model that answers no prompts for one object."""
CLICKS_ALONE = Sam31Options(no_grounding=True)
"""The options of a model that answers prompts for one object and no others."""
WITH_VIDEO = Sam31Options(video=True)
"""The options of a model that tracks objects, too."""


def _programs(case: Case, settings: Settings, options: Sam31Options) -> Iterator[Program]:
    from harness.models.sam31.deployed.entry_points import programs

    return programs(case, settings, options)


DEPLOYABLE = replace(SAM_3, model=SAM_3_1, programs=_programs, options=Sam31Options, weights=(Weights.SEEDED.value,))
"""The whole model, which `sam3-tvm compile --model sam3.1` writes into a folder."""
