"""Selects the entry points of a compiled model, and builds their programs."""

from __future__ import annotations

from collections.abc import Iterator

from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.entry_points.entry_point import EntryPoint
from harness.models.sam3.deployed.entry_points.grounding import ENTRY_POINTS, GROUNDING
from harness.models.sam3.deployed.entry_points.interactive import INTERACTIVE_ENTRY_POINTS
from harness.models.sam3.deployed.entry_points.video import VIDEO_ENTRY_POINTS
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam3.groups import note_groups


def entry_points(options: Sam3Options) -> tuple[EntryPoint, ...]:
    """Returns the entry points, exported from PyTorch, of a model with the given options."""
    chosen = (VIDEO_ENTRY_POINTS if options.video else INTERACTIVE_ENTRY_POINTS) if options.clicks else ENTRY_POINTS
    return tuple(point for point in chosen if not (options.no_grounding and point in GROUNDING))


def programs(case: Case, settings: Settings, options: Sam3Options) -> Iterator[Program]:
    """Builds the model of a case and yields its entry points; to be used inside `harness.models.sam3.upstream`."""
    from harness.models.sam3.build import build_model

    model = build_model(
        case.scale,
        case.seed,
        settings.checkpoint,
        weights=case.weights,
        interactive=options.clicks > 0,
        allow_partial=settings.allow_partial,
    )
    note_groups(model)
    for entry_point in entry_points(options):
        yield entry_point.program(model, options.capacity, TARGETS[case.target].upsampling)
