"""Colours that stay apart for colour-blind readers, and the style of every plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EDGE, FAINT = "#222222", "#bdbdbd"

BY_SIDE: Mapping[str, str] = {
    "torch": "#d9822b",
    "untuned": "#86b7e6",
    "tuned": "#1f5fa8",
    "tvm fp32": "#86b7e6",
    "tvm default": "#666666",
    "torch.compile": "#7a4a12",
    "torch.compile max-autotune": "#7a4a12",
    "onnxruntime": "#1b9e77",
    "openvino": "#a3499f",
    "openvino f32": "#a3499f",
    "torch bf16": "#d9822b",
    "torch.compile bf16": "#7a4a12",
    "torch cuda": "#1b9e77",
    "torch.compile cuda": "#a3499f",
    "torch cuda fp16": "#1b9e77",
    "torch cuda bf16": "#1b9e77",
}
"""Ours in blue, PyTorch in orange; they differ in lightness too, so they stay apart in grey. Settings of one peer share
a colour, and differ in their markers."""

MARKER_BY_SIDE: Mapping[str, str] = {
    "torch": "o",
    "untuned": "o",
    "tuned": "o",
    "tvm fp32": "v",
    "tvm default": "v",
    "torch.compile": "s",
    "torch.compile max-autotune": "P",
    "onnxruntime": "D",
    "openvino": "^",
    "openvino f32": "<",
    "torch bf16": "*",
    "torch.compile bf16": "X",
    "torch cuda": "o",
    "torch.compile cuda": "s",
    "torch cuda fp16": "^",
    "torch cuda bf16": "*",
}

STYLE: Mapping[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "figure.dpi": 150,
    "figure.titlesize": 10.5,
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
"""Sizes in points for a figure `WIDTH` inches wide, which a page of GitHub shows at about 100 dots per inch."""

WIDTH = 8.3
"""Width of a figure in inches."""

OTHER = "#666666"


def colour(side: str) -> str:
    """Returns the colour of a side: grey for one that has none of its own."""
    return BY_SIDE.get(side, OTHER)
