"""The sides of a measurement: their names in the files, and what the report calls them.

This is the only place that knows how the sides of older files were named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PYTORCH, UNTUNED, TUNED = "torch", "untuned", "tuned"
OURS = (TUNED, UNTUNED)
"""The sides that are ours, the better one first."""
TVM_FP32 = "tvm fp32"
"""Ours in fp32, beside a case in half precision."""
OPENVINO_F32 = "openvino f32"
LABELS: Mapping[str, str] = {
    PYTORCH: "PyTorch",
    UNTUNED: "TVM untuned",
    TUNED: "TVM tuned",
    TVM_FP32: "TVM fp32",
    "tvm default": "TVM default",
    "torch.compile": "torch.compile",
    "torch.compile max-autotune": "torch.compile max-autotune",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    OPENVINO_F32: "OpenVINO f32",
    "torch bf16": "PyTorch bf16",
    "torch.compile bf16": "torch.compile bf16",
    "torch cuda": "PyTorch on the GPU",
    "torch.compile cuda": "torch.compile on the GPU",
    "torch cuda fp16": "PyTorch fp16 on the GPU",
    "torch cuda bf16": "PyTorch bf16 on the GPU",
}
"""Labels of the sides; a side that is not here keeps its name."""
PEERS = tuple(name for name in LABELS if name not in (PYTORCH, UNTUNED, TUNED, TVM_FP32))


def recorded_side(name: str, side: Mapping[str, Any]) -> str:
    """Returns the name of a side of a file, whose `setting` older files do not tell: their OpenVINO was set to f32."""
    return OPENVINO_F32 if name == "openvino" and "setting" not in side else name
