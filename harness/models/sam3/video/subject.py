"""Defines the subject of videos."""

from __future__ import annotations

from harness.core.case import Case
from harness.core.precision import DEFAULT_PRECISION
from harness.core.settings import Settings
from harness.models.sam3.deployed.options import WITH_VIDEO
from harness.models.sam3.video import OUTPUTS
from harness.models.sam3.video.sessions import SESSION_FRAMES
from harness.models.subject import Subject, Workload


def _open(case: Case, settings: Settings) -> Workload:
    from harness.models.sam3.video.workload import VideoWorkload

    return VideoWorkload(case, settings)


VIDEO = Subject(
    name="video",
    summary="texts, boxes and sessions of fixtures/video*.toml to the objects of each frame, and each step of tracking",
    inputs=("frames", "text", "box", "points", "mask"),
    outputs=(*OUTPUTS, SESSION_FRAMES),
    open=_open,
    model="sam3",
    uses_rope=True,
    whole=True,
    options=WITH_VIDEO,
    long=True,
    symbolic=True,
    precisions=(DEFAULT_PRECISION,),
)
