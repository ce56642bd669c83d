"""Defines the subjects of SAM 3: each component, the whole model, masks of one object, and videos."""

from __future__ import annotations

from functools import partial

from harness.core.case import Case
from harness.core.settings import Settings
from harness.core.weights import WEIGHTS
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.components.component import Component
from harness.models.sam3.end_to_end.subject import END_TO_END
from harness.models.sam3.interactive.subject import INTERACTIVE
from harness.models.sam3.video.subject import VIDEO
from harness.models.subject import Subject, Workload

NAME = "sam3"
"""The name of the model."""


def component_subject(component: Component) -> Subject:
    """Returns the subject of a component, whose trace has one independent call for each sample."""
    return Subject(
        name=component.name,
        summary=component.summary,
        inputs=component.inputs,
        outputs=component.outputs,
        open=partial(open_component, component),
        model=NAME,
        uses_rope=component.uses_rope,
        weights=WEIGHTS,
        emulated=component.emulated,
    )


def open_component(component: Component, case: Case, settings: Settings) -> Workload:
    """Builds the model of a case, and returns the workload of one component with its captured inputs."""
    from harness.models.sam3.source import Source
    from harness.models.traced import TracedWorkload

    source = Source(component, case, settings)
    return TracedWorkload(source.programs, source.trace, source.reference, source.oracle, case, source.draws)


SUBJECTS = {component.name: component_subject(component) for component in COMPONENTS.values()} | {
    END_TO_END.name: END_TO_END,
    INTERACTIVE.name: INTERACTIVE,
    VIDEO.name: VIDEO,
}
"""Every subject by name."""
