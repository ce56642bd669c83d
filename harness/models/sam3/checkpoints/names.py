"""Converts names between upstream's checkpoint, its image model and its video model, and tells SAM 3.1's from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from harness.models.sam3.checkpoints.hugging_face import VIDEO_PREFIX

if TYPE_CHECKING:
    import torch

PREFIXES = {"detector.": "", "tracker.": "inst_interactive_predictor.model."}
"""Prefix in the checkpoint → prefix in the image model (see `sam3.model_builder._load_checkpoint`)."""

_SAM_3_1 = re.compile(r"tracker\.model\..*|(.*\.)?(interactive_\w+|propagation_convs)\..*")
"""Names of SAM 3.1, whose necks and tracker are others."""

COMPUTED = re.compile(r"(.*\.)?(freqs_cis|attn_mask)")
"""Buffers that are formulas: they are loaded if the checkpoint has them, and may be absent."""


def video_name(name: str) -> str:
    """Returns the name that a tensor of the image model has in upstream's checkpoint and video model."""
    for checkpoint_prefix, model_prefix in PREFIXES.items():
        if model_prefix and name.startswith(model_prefix):
            return checkpoint_prefix + name.removeprefix(model_prefix)
    return f"detector.{name}"


def model_name(name: str) -> str:
    """Returns the name in the image model: published names have a prefix, those of a trainer may be the model's."""
    prefix = next(filter(name.startswith, PREFIXES), "")
    return PREFIXES.get(prefix, "") + name.removeprefix(prefix)


def bare_name(name: str) -> str:
    """Returns the name in the image model, or in Transformers' image model, whichever layout it belongs to."""
    return model_name(name).removeprefix(VIDEO_PREFIX)


def by_bare_name(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], list[str]]:
    """Returns names by bare name, and the bare names that several tensors have."""
    names: dict[str, str] = {}
    doubled = []
    for name in tensors:
        bare = bare_name(name)
        if bare in names:
            doubled.append(bare)
        names[bare] = name
    return names, doubled


def sam_3_1_name(names: Iterable[str]) -> str | None:
    """Returns the first name that SAM 3.1 has and SAM 3 has not, if there is one."""
    return next(filter(_SAM_3_1.fullmatch, names), None)
