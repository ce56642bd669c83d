"""Defines the precisions: types of a compiled component's weights and activations, all with fp32 arithmetic.

- `fp32`: Every value is a float32, as in PyTorch's model.
- `fp16`, `bf16`: On a GPU, the operands of its matrix units are half precision: those of matrix products, convolutions
  and attention, weights included, and values that are only moved between such operations. Sums are float32. On a CPU,
  the operands of linear layers are half precision and, with an instruction for it, those of attention.
  `harness.compiler.lowering.precision` says what stays float32 and why. `harness.parity.autocast` defines the
  reference.

Inputs and outputs of a component keep their types. This module needs neither torch nor tvm.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PRECISION = "fp32"
"""The precision that is verified by default."""


@dataclass(frozen=True)
class Precision:
    """One choice of types for weights and activations.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        dtype: Type of the operands of products, by its name in TVM, NumPy (with ml_dtypes) and PyTorch.
    """

    name: str
    summary: str
    dtype: str

    @property
    def is_half(self) -> bool:
        """Returns whether some values are less precise than float32."""
        return self.dtype != "float32"

    @property
    def judged_by_oracle(self) -> bool:
        """Returns whether the float64 oracle judges outputs, instead of PyTorch's float32 elements."""
        return self.is_half


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32 throughout", "float32"),
        Precision("fp16", "operands of products in float16 (11 bits, up to 65504), sums in float32", "float16"),
        Precision("bf16", "operands of products in bfloat16 (8 bits, float32's range), sums in float32", "bfloat16"),
    )
}
"""Every precision by name, in listing order."""

HALF_DTYPES = tuple(precision.dtype for precision in PRECISIONS.values() if precision.is_half)
"""Types that are less precise than float32."""

ROUNDED_OPERANDS = "rounded_operands"
"""Attribute of a Relax function whose operands were rounded: the name of the half precision type."""
