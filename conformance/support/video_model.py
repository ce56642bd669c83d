"""Builds upstream's own video model on the CPU, shallow."""

from __future__ import annotations

import hashlib
from copy import deepcopy
from typing import Any

import torch

from conformance.support.shallow import interactive_model
from harness.models.sam3.build import build_video_model


def video_model() -> Any:
    """Upstream's video model of the shallow scale; a picture is encoded once, whichever session it is in."""
    model = build_video_model(interactive_model(), "shallow")
    _encodes_once(model.detector.backbone)
    return model


def _encodes_once(backbone: Any) -> None:
    """The features of a picture follow from its pixels alone; whoever asks for them gets copies."""
    encode, known = backbone.forward_image, dict[str, Any]()

    def forward_image(samples: torch.Tensor) -> Any:
        digest = hashlib.sha256(samples.contiguous().numpy()).hexdigest()
        if digest not in known:
            known[digest] = encode(samples)
        return deepcopy(known[digest])

    backbone.forward_image = forward_image
