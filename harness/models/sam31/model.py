"""Registers SAM 3.1 as a model that the harness verifies."""

from __future__ import annotations

from dataclasses import replace

from harness.core.case import Weights
from harness.core.precision import DEFAULT_PRECISION
from harness.core.settings import FIXTURES
from harness.models.model import Model
from harness.models.sam3.model import MODEL as SAM_3
from harness.models.sam3.subjects import component_subject
from harness.models.sam31.checkpoint import describe_checkpoint
from harness.models.sam31.components import COMPONENTS
from harness.models.sam31.inspection import inspect_checkpoint

NAME = "sam3.1"

MODEL = Model(
    name=NAME,
    subjects={
        component.name: replace(
            component_subject(component),
            model=NAME,
            weights=(Weights.SEEDED.value,),
            precisions=(DEFAULT_PRECISION,),
        )
        for component in COMPONENTS
    },
    context=SAM_3.context,
    prepare=SAM_3.prepare,
    check=SAM_3.check,
    describe_checkpoint=describe_checkpoint,
    inspect_checkpoint=inspect_checkpoint,
    expectations=FIXTURES / "sam31_expectations.toml",
)
