"""The whole model as one subject: photographs and prompts in, masks out, held to upstream's `Sam3Processor`."""

from __future__ import annotations

from harness.core.case import Case
from harness.core.settings import Settings
from harness.core.subject import Subject, Workload

RAW = ("logits", "boxes", "masks", "presence", "semantic")
"""Outputs of the model, under the strict gate; as `harness.models.sam3.deployed.entry_points.GROUND` describes them."""
FINAL = ("found/queries", "found/masks", "found/boxes", "found/scores")
"""What is found in the photograph, under the criteria of `harness.parity.detections`."""


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
)
