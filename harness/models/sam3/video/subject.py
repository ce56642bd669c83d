"""Videos as a subject."""

from __future__ import annotations

from harness.core.case import Case
from harness.core.precision import DEFAULT_PRECISION
from harness.core.settings import Settings
from harness.models.sam3.video import OUTPUTS
from harness.models.subject import Subject, Workload


def _open(case: Case, settings: Settings) -> Workload:
    from harness.models.sam3.video.workload import VideoWorkload

    return VideoWorkload(case, settings)


VIDEO = Subject(
    name="video",
    summary="texts and boxes of fixtures/video.toml on videos to the objects of every frame, and each step of tracking",
    inputs=("frames", "text", "box"),
    outputs=OUTPUTS,
    open=_open,
    model="sam3",
    uses_rope=True,
    whole=True,
    long=True,
    symbolic=True,
    precisions=(DEFAULT_PRECISION,),
)
