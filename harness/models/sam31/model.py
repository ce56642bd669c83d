"""Registers SAM 3.1 as a model that the harness verifies."""

from __future__ import annotations

from dataclasses import replace

from harness.core.case import Weights
from harness.core.precision import DEFAULT_PRECISION
from harness.core.settings import FIXTURES
from harness.models.model import Model
from harness.models.sam3.model import MODEL as SAM_3
from harness.models.sam3.subjects import END_TO_END as SAM_3_END_TO_END
from harness.models.sam3.subjects import INTERACTIVE as SAM_3_INTERACTIVE
from harness.models.sam3.subjects import component_subject, scripted_subject
from harness.models.sam3.video import STEP
from harness.models.sam31.checkpoint import describe_checkpoint
from harness.models.sam31.components import BUILDER, COMPONENTS
from harness.models.sam31.deployed.deployable import CLICKS_ALONE, DEPLOYABLE, GROUNDING_ALONE, WITH_VIDEO
from harness.models.sam31.inspection import inspect_checkpoint
from harness.models.subject import Subject
from harness.runtime.sam3.description import SAM_3_1

END_TO_END = scripted_subject(
    "harness.models.sam3.end_to_end.script",
    GROUNDING_ALONE,
    builder=BUILDER,
    name="sam31_end_to_end",
    summary="SAM 3.1: photographs and prompts of fixtures/end_to_end.toml to masks",
    inputs=SAM_3_END_TO_END.inputs,
    outputs=SAM_3_END_TO_END.outputs,
)
INTERACTIVE = scripted_subject(
    "harness.models.sam3.interactive.script",
    CLICKS_ALONE,
    builder=BUILDER,
    name="sam31_interactive",
    summary="SAM 3.1: clicks, boxes and masks of fixtures/interactive.toml to masks of one object, refined",
    inputs=SAM_3_INTERACTIVE.inputs,
    outputs=SAM_3_INTERACTIVE.outputs,
)
VIDEO = scripted_subject(
    "harness.models.sam31.video",
    WITH_VIDEO,
    builder=BUILDER,
    name="sam31_video",
    summary="SAM 3.1: sessions of fixtures/sam31_sessions.toml, each step of tracking",
    inputs=("frames", "text", "points", "mask"),
    outputs=STEP,
    long=True,
    precisions=(DEFAULT_PRECISION,),
)


def _subject_of_sam_3_1(subject: Subject) -> Subject:
    return replace(subject, model=SAM_3_1, weights=(Weights.SEEDED.value,))


MODEL = Model(
    name=SAM_3_1,
    subjects={
        subject.name: _subject_of_sam_3_1(subject)
        for subject in (*map(component_subject, COMPONENTS), END_TO_END, INTERACTIVE, VIDEO)
    },
    deployable=DEPLOYABLE,
    context=SAM_3.context,
    prepare=SAM_3.prepare,
    check=SAM_3.check,
    describe_checkpoint=describe_checkpoint,
    inspect_checkpoint=inspect_checkpoint,
    expectations=FIXTURES / "sam31_expectations.toml",
)
