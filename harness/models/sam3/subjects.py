"""Defines the subjects of SAM 3: each component, the whole model, masks of one object, and videos."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from harness.core.case import WEIGHTS, Case
from harness.core.precision import DEFAULT_PRECISION
from harness.core.settings import Settings
from harness.models.sam3 import end_to_end, interactive, video
from harness.models.sam3.captures import BUILDER
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.components.component import Component
from harness.models.sam3.deployed.options import CLICKS_ALONE, GROUNDING_ALONE, WITH_VIDEO, Sam3Options
from harness.models.subject import Subject, Workload
from harness.runtime.sam3.description import NAME


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
    return TracedWorkload(source.programs, source.trace, source.reference, case, source.draws)


def scripted_subject(script: str, options: Sam3Options, builder: str = BUILDER, **fields: Any) -> Subject:
    """Returns the subject of a whole model that is asked questions.

    Args:
        script: The module whose `SCRIPTS` define the questions, how they are asked and how the answers are judged.
        options: The options that the compiled model must have.
        builder: The module that builds the model.
        fields: Further fields of the subject.
    """
    return Subject(
        open=partial(open_scripts, script, options, builder),
        model=NAME,
        uses_rope=True,
        whole=True,
        options=options,
        **fields,
    )


def open_scripts(script: str, options: Sam3Options, builder: str, case: Case, settings: Settings) -> Workload:
    """Returns the workload of the scripts of a module."""
    from harness.models.sam3.scripted import ScriptedWorkload

    return ScriptedWorkload(import_module(script).SCRIPTS, options, builder, case, settings)


END_TO_END = scripted_subject(
    "harness.models.sam3.end_to_end.script",
    GROUNDING_ALONE,
    name="end_to_end",
    summary="the whole model: photographs and prompts of fixtures/end_to_end.toml to masks",
    inputs=("photograph", "texts", "boxes", "points"),
    outputs=end_to_end.RAW + end_to_end.FINAL,
)
INTERACTIVE = scripted_subject(
    "harness.models.sam3.interactive.script",
    CLICKS_ALONE,
    name="interactive",
    summary="clicks, boxes and masks of fixtures/interactive.toml on photographs to masks of one object, refined",
    inputs=("photograph", "points", "box", "mask"),
    outputs=interactive.OUTPUTS,
)
VIDEO = scripted_subject(
    "harness.models.sam3.video.script",
    WITH_VIDEO,
    name="video",
    summary="texts, boxes and sessions of fixtures/video*.toml to the objects of each frame, and each step of tracking",
    inputs=("frames", "text", "box", "points", "mask"),
    outputs=(*video.OUTPUTS, video.SESSION_FRAMES),
    long=True,
    symbolic=True,
    precisions=(DEFAULT_PRECISION,),
)
SUBJECTS = {component.name: component_subject(component) for component in COMPONENTS.values()} | {
    subject.name: subject for subject in (END_TO_END, INTERACTIVE, VIDEO)
}
"""Every subject by name."""
