"""Defines the options of `sam3-tvm compile` that SAM 3 adds, and its part of a folder's manifest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import typer
from msgspec import to_builtins

from harness.compiler.deployment.deployable import ModelOptions
from harness.compiler.lowering.symbolic import describe_symbolic_support, takes_symbolic_axes
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import Settings
from harness.models.sam3.checkpoints.loading import CLICKS, POINT_PROMPTS, Checkpoint
from harness.runtime.manifest import Manifest
from harness.runtime.sam3 import VOCABULARY_FILE
from harness.runtime.sam3.description import DEFAULT_CLICKS, Capacity, Sam3Description, read_sam3_description


@dataclass(frozen=True)
class Sam3Options(ModelOptions):
    """The capacity of a compiled SAM 3, and which part of it is left out.

    Attributes:
        checkpoint_class: The class of the model's checkpoints.
        needs_symbolic_axes: Whether tracking attends to any number of memories.
    """

    checkpoint_class: ClassVar[type[Checkpoint]] = Checkpoint
    needs_symbolic_axes: ClassVar[bool] = True

    points: Annotated[int, typer.Option(min=1, help="Largest number of points in one prompt.")] = Capacity().points
    boxes: Annotated[int, typer.Option(min=1, help="Largest number of boxes in one prompt.")] = Capacity().boxes
    clicks: Annotated[
        int, typer.Option(min=0, help="Largest number of points in a prompt for one object; 0 leaves such prompts out.")
    ] = DEFAULT_CLICKS
    no_grounding: Annotated[
        bool, typer.Option("--no-grounding", help="Leave out what finds everything that a text or a box means.")
    ] = False
    video: Annotated[bool, typer.Option("--video", help="Add what tracks objects through videos.")] = False

    def __str__(self) -> str:
        return str(self.capacity)

    @property
    def capacity(self) -> Capacity:
        """Returns the maximum length of a prompt."""
        return Capacity(self.points, self.boxes, self.clicks, self.video)

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Self:
        """Returns the options that a folder was compiled with; which entry points were left out, its entries say."""
        return cls(**to_builtins(read_sam3_description(folder, manifest).capacity))

    def fit(self, case: Case, settings: Settings, print_note: Callable[[str], None]) -> Self:
        """Returns the options without clicks if a checkpoint has no weights for them.

        Raises:
            HarnessError: Nothing is left to compile, or what the tracker needs is missing.
        """
        clicks = self.clicks
        if clicks and CLICKS not in self._abilities(settings):
            print_note(f"{settings.checkpoint} has no weights for clicks; they are left out.")
            clicks = 0
        if self.no_grounding and not clicks:
            raise HarnessError("Without grounding and without clicks nothing is left; leave out one of them.")
        if self.video and not clicks:
            raise HarnessError("Tracking needs the part of the model that answers clicks; leave out --clicks 0.")
        if self.video and self.needs_symbolic_axes and not takes_symbolic_axes(case):
            raise HarnessError(
                f"Tracking attends to any number of memories, which takes {describe_symbolic_support()}; "
                "leave out --video, or the others."
            )
        return replace(self, clicks=clicks)

    def includes(self, options: Self) -> bool:
        """Returns whether a model of these options answers every prompt that a model of the others answers."""
        return self.capacity.includes(options.capacity)

    def manifest_part(self, settings: Settings) -> Mapping[str, Any]:
        """Returns capacity, vocabulary, and whether the weights know points as prompts."""
        point_prompts = POINT_PROMPTS in self._abilities(settings)
        description: dict[str, Any] = to_builtins(Sam3Description(self.capacity, VOCABULARY_FILE, point_prompts))
        return description

    def summary(self) -> str:
        """Returns how many points, boxes and clicks a prompt may have."""
        clicks = f", {self.clicks} clicks on an object" if self.clicks else ""
        return f"up to {self.points} points and {self.boxes} boxes a prompt{clicks}"

    def _abilities(self, settings: Settings) -> Collection[str]:
        """Returns what weights can do; opens a checkpoint that nobody has described."""
        if settings.checkpoint is None:
            return (POINT_PROMPTS, CLICKS)
        return settings.abilities or self.checkpoint_class.open(settings.checkpoint, values=False).abilities


GROUNDING_ALONE = Sam3Options(clicks=0)
"""The options of a model that answers no prompts for one object."""
CLICKS_ALONE = Sam3Options(no_grounding=True)
"""The options of a model that answers prompts for one object and no others."""
WITH_VIDEO = Sam3Options(video=True)
"""The options of a model that tracks objects, too."""
