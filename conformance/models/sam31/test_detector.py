"""The detector behind SAM 3.1's neck is SAM 3's: with the same weights it finds the same, bit for bit."""

from __future__ import annotations

import torch

from harness.models.sam3.build import build_architecture as build_sam3
from harness.models.sam3.capture import capture, load_inputs
from harness.models.sam3.upstream import upstream
from harness.models.sam3.weights import seed_weights
from harness.models.sam31.build import build_architecture


def test_it_finds_what_that_of_sam_3_finds() -> None:
    later, earlier = build_architecture("tiny"), build_sam3("tiny")
    seed_weights(later, 0)
    seed_weights(earlier, 1)
    state = later.detector.state_dict()
    absent, unknown = earlier.load_state_dict(state, strict=False)
    assert {name.rpartition(".conv_")[0] for name in absent} == {"backbone.vision_backbone.convs.3"}
    assert {name.split(".")[2] for name in unknown} == {"interactive_convs", "propagation_convs"}
    with upstream():
        found, expected = (capture(model, load_inputs()) for model in (later.detector, earlier))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
