"""The whole model as one case: photographs and prompts in, masks out, held to upstream's `Sam3Processor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EndToEnd:
    """What `sam3-tvm verify --component end_to_end` verifies, told like a `harness.models.sam3.components.Component`.

    Attributes:
        name: What it is called where components are named, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        inputs: What goes in.
        outputs: What is judged of every answer: the model's raw outputs, then what a user gets.
        uses_rope: Whether rotary position encoding is inside.
    """

    name: str
    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    uses_rope: bool = True


RAW = ("logits", "boxes", "masks", "presence", "semantic")
"""Outputs of the model, under the strict gate; as `harness.models.sam3.deployed.entry_points.GROUND` describes them."""
FINAL = ("found/queries", "found/masks", "found/boxes", "found/scores")
"""What is found in the photograph, under the criteria of `harness.parity.detections`."""

END_TO_END = EndToEnd(
    name="end_to_end",
    summary="the whole model: photographs and prompts of fixtures/end_to_end.toml to masks",
    inputs=("photograph", "texts", "boxes", "points"),
    outputs=RAW + FINAL,
)
