"""Works around group_norm without weight and bias."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Normalize(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.group_norm(x, 2)


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    x, weight, bias, _, channels, _, groups, epsilon = importer.retrieve_args(node)
    dtype = x.ty.dtype.dtype
    return importer.block_builder.emit(
        relax.op.nn.group_norm(
            x,
            relax.const(np.ones(channels), dtype) if weight is None else weight,
            relax.const(np.zeros(channels), dtype) if bias is None else bias,
            num_groups=groups,
            channel_axis=1,
            axes=list(range(2, len(x.ty.shape))),
            epsilon=epsilon,
        )
    )


DEFECTS = (
    TorchDefect(
        name="group_norm_without_weight",
        title="group_norm without weight and bias is rejected",
        location="ExportedProgramImporter._native_group_norm",
        description="The missing weight is handed on as None, a null pointer in the module.",
        reproduction=lambda: (_Normalize(), (torch.arange(16.0).reshape(1, 4, 2, 2),)),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "null pointer"),
        workaround="A converter that fills in ones and zeros.",
        converters={"native_group_norm.default": _convert},
    ),
)
