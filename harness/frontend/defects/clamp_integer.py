"""clamp of an integer tensor with one bound."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.frontend.defect import Defect, RawOutcome, Symptom
from harness.frontend.rewriting import argument


class _Clamp(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return _Clamp(), (torch.tensor([-1, 1, 5]),)


def _clamp(node: Node, importer: Any, lowest: Any, highest: Any) -> Any:
    from tvm import relax

    emit = importer.block_builder.emit
    dtype = importer._convert_data_type(node.meta["val"].dtype)
    value = emit(relax.op.astype(importer.env[node.args[0]], dtype))
    for bound, choose in ((lowest, relax.op.maximum), (highest, relax.op.minimum)):
        if bound is not None:
            limit = importer.env[bound] if isinstance(bound, Node) else relax.const(bound, dtype)
            limit = emit(relax.op.astype(limit, dtype)) if isinstance(bound, Node) else limit
            value = emit(choose(value, limit))
    return value


def _convert_clamp(node: Node, importer: Any) -> Any:
    return _clamp(node, importer, argument(node, 1, "min"), argument(node, 2, "max"))


def _convert_clamp_min(node: Node, importer: Any) -> Any:
    return _clamp(node, importer, argument(node, 1, "min"), None)


def _convert_clamp_max(node: Node, importer: Any) -> Any:
    return _clamp(node, importer, None, argument(node, 1, "max"))


DEFECTS = (
    Defect(
        name="clamp_integer",
        title="clamp of an integer tensor with one bound is rejected",
        where="BaseFXGraphImporter._clamp",
        what="The missing bound becomes an infinity, which has no integer value.",
        reproduction=_reproduction,
        raw=RawOutcome(Symptom.REJECTED, "RuntimeError", "infinity"),
        workaround="Converters that emit a maximum for the lower and a minimum for the upper bound, in the result's dtype.",
        converters={
            "clamp.default": _convert_clamp,
            "clamp.Tensor": _convert_clamp,
            "clamp_min.default": _convert_clamp_min,
            "clamp_max.default": _convert_clamp_max,
        },
    ),
)
