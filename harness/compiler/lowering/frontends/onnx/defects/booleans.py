"""Works around TVM's rejection of comparisons, sums and products of booleans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends import booleans
from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect

if TYPE_CHECKING:
    from tvm import relax


class _FloorDivide(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x // 3


def _convert(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    from tvm import relax
    from tvm.relax.frontend.onnx.onnx_frontend import Equal

    types = [getattr(value, "ty", None) for value in inputs]
    if any(isinstance(ty, relax.TensorType) and str(ty.dtype) == "bool" for ty in types):
        return relax.op.equal(*(relax.op.astype(value, "int8") for value in inputs))
    return Equal.get_converter(13)(builder, inputs, attributes, [{}, {}])


DEFECTS = (
    OnnxDefect(
        name="boolean_equal",
        title="Equal of booleans does not compile",
        location="LLVM code generation of equal and not_equal",
        description=(
            "Booleans are compared with a floating-point instruction, which LLVM's verifier rejects. PyTorch's "
            "exporter compares them in an integer division with rounding down, and for == of masks."
        ),
        reproduction=lambda: (_FloorDivide(), (torch.tensor([-4, 4, -1, 3]),)),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "Invalid operand types for FCmp"),
        workaround="A converter that compares them as int8.",
        converters={"Equal": _convert},
    ),
    OnnxDefect(**booleans.FACTS, program_passes=(booleans.to_logic,)),
)
