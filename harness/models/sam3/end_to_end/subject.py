"""Defines the subject of the whole model."""

from __future__ import annotations

from harness.core.case import Case
from harness.core.settings import Settings
from harness.models.sam3.deployed.options import GROUNDING_ALONE
from harness.models.sam3.end_to_end import FINAL, RAW
from harness.models.subject import Subject, Workload


def _open(case: Case, settings: Settings) -> Workload:
    from harness.models.sam3.end_to_end.workload import EndToEndWorkload

    return EndToEndWorkload(case, settings)


END_TO_END = Subject(
    name="end_to_end",
    summary="the whole model: photographs and prompts of fixtures/end_to_end.toml to masks",
    inputs=("photograph", "texts", "boxes", "points"),
    outputs=RAW + FINAL,
    open=_open,
    model="sam3",
    uses_rope=True,
    whole=True,
    options=GROUNDING_ALONE,
)
