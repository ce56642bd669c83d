"""Converts the tensors of upstream's models to Transformers' layout, the inverse of `from_hugging_face`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.models.sam3.checkpoints.hugging_face import (
    _FREQUENCIES,
    _HF_NAMES,
    _HF_PARTS,
    _POINT,
    _POINT_TABLE,
    _POSITIONS,
    _SHARED_FREQUENCIES,
    _TEXT_PROJECTION,
    POINTS,
    _with_placeholder,
)


def to_hugging_face(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts the tensors of upstream's image model and tracker to Transformers' names and shapes.

    Tensors that the layout lacks are left out: formulas, `POINTS`, the class token's position.

    Raises:
        KeyError: A name is not a name of SAM 3's image model.
    """
    converted: dict[str, torch.Tensor] = {}
    points: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        template, number = _with_placeholder(name, _HF_NAMES, _HF_PARTS)
        if template in _HF_PARTS:
            parts = (part.replace("#", number) for part in _HF_PARTS[template])
            converted |= zip(parts, tensor.chunk(3), strict=True)
        elif template in _HF_NAMES:
            if not POINTS.fullmatch(name):
                shaped = tensor[:, 1:] if name == _POSITIONS else tensor.T if name == _TEXT_PROJECTION else tensor
                converted[_HF_NAMES[template].replace("#", number)] = shaped
        elif (point := _POINT.fullmatch(name)) is not None:
            points[int(point[1])] = tensor
        elif not name.endswith(("freqs_cis", "attn_mask")):
            raise KeyError(name)
    if points:
        converted[_POINT_TABLE] = torch.cat([points[kind] for kind in sorted(points)])
    if _FREQUENCIES in state:
        converted[_SHARED_FREQUENCIES] = state[_FREQUENCIES]
    return converted
