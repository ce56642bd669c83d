"""Selects the entry points of a compiled model, and builds their programs."""

from __future__ import annotations

from collections.abc import Iterator

from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.entry_points.entry_point import EntryPoint
from harness.models.sam3.deployed.entry_points.grounding import ENTRY_POINTS
from harness.models.sam3.deployed.entry_points.interactive import INTERACTIVE_ENTRY_POINTS
from harness.models.sam3.deployed.entry_points.video import VIDEO_ENTRY_POINTS
from harness.models.sam3.groups import note_groups
from harness.runtime.manifest import Capacity


def entry_points(capacity: Capacity) -> tuple[EntryPoint, ...]:
    """Returns the entry points, exported from PyTorch, of a model of the given capacity."""
    if capacity.video:
        return VIDEO_ENTRY_POINTS
    return INTERACTIVE_ENTRY_POINTS if capacity.clicks else ENTRY_POINTS


def programs(case: Case, settings: Settings, capacity: Capacity) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    from harness.models.sam3.build import build_model

    model = build_model(
        case.scale,
        case.seed,
        settings.checkpoint,
        weights=case.weights,
        interactive=capacity.clicks > 0,
        allow_partial=settings.allow_partial,
    )
    note_groups(model)
    for entry_point in entry_points(capacity):
        yield entry_point.program(model, capacity, TARGETS[case.target].upsampling)
