"""Defines the subject of masks of one object."""

from __future__ import annotations

from harness.core.case import Case
from harness.core.settings import Settings
from harness.models.sam3.deployed.options import CLICKS_ALONE
from harness.models.sam3.interactive import OUTPUTS
from harness.models.subject import Subject, Workload


def _open(case: Case, settings: Settings) -> Workload:
    from harness.models.sam3.interactive.workload import InteractiveWorkload

    return InteractiveWorkload(case, settings)


INTERACTIVE = Subject(
    name="interactive",
    summary="clicks, boxes and masks of fixtures/interactive.toml on photographs to masks of one object, refined",
    inputs=("photograph", "points", "box", "mask"),
    outputs=OUTPUTS,
    open=_open,
    model="sam3",
    uses_rope=True,
    whole=True,
    options=CLICKS_ALONE,
)
