"""Works around the decomposition of GroupNormalization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.onnx.rewriting import shape_of

if TYPE_CHECKING:
    from tvm import relax


class _GroupNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.group_norm(x, 2, weight, bias)


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return _GroupNorm(), tuple(torch.randn(*shape, generator=generator) for shape in ((1, 4, 3, 3), (4,), (4,)))


def _convert(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    from tvm import relax

    data = builder.normalize(inputs[0])
    axes = list(range(2, len(shape_of(data))))
    return relax.op.nn.group_norm(
        data, *inputs[1:], attributes["num_groups"], channel_axis=1, axes=axes, epsilon=attributes.get("epsilon", 1e-5)
    )


DEFECTS = (
    OnnxDefect(
        name="group_norm_apart",
        title="Weight and bias of GroupNormalization are applied by operators behind it",
        location="tvm.relax.frontend.onnx.onnx_frontend.GroupNormalization",
        description=(
            "Since opset 21 they are one for each channel, as relax.nn.group_norm takes them; the converter gives that "
            "ones and zeros instead, and multiplies and adds afterwards."
        ),
        reproduction=_reproduction,
        raw=RawOutcome(
            Symptom.SLOW, absent="R.nn.group_norm(x, weight, bias", wrong="no weight in relax.nn.group_norm"
        ),
        workaround="A converter that hands them on.",
        converters={"GroupNormalization": _convert},
    ),
)
