"""Precisions: the type in which a compiled component keeps its weights and activations; all of them compute in fp32.

- `fp32`: everything is a float32, as in the model that PyTorch runs.
- `fp16`, `bf16`: what is multiplied and summed on a GPU's matrix units is half precision: the operands of matrix
  products, convolutions and attention, weights among them, and what is only moved between such operations. Sums are
  float32 sums. On CPUs these are the operands of linear layers and, with an instruction for it, of attention.
  `harness.lowering.precision` says what stays float32 and why, and `harness.parity.autocast` what such a case is judged
  against.

Inputs and outputs of a component keep their types. Needs neither torch nor tvm.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PRECISION = "fp32"
"""The precision that is verified unless another one is asked for."""


@dataclass(frozen=True)
class Precision:
    """One way to keep weights and activations.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        dtype: Type of the operands of products, by the name that TVM, NumPy (with ml_dtypes) and PyTorch give it.
    """

    name: str
    summary: str
    dtype: str

    @property
    def is_half(self) -> bool:
        """Whether anything is kept in less than float32."""
        return self.dtype != "float32"

    @property
    def judged_by_oracle(self) -> bool:
        """Whether outputs are held to the float64 oracle, and not to PyTorch's float32 element by element."""
        return self.is_half


PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32 throughout", "float32"),
        Precision("fp16", "operands of products in float16 (11 bits, up to 65504), sums in float32", "float16"),
        Precision("bf16", "operands of products in bfloat16 (8 bits, float32's range), sums in float32", "bfloat16"),
    )
}
"""Every precision by name, in the order in which they are listed."""

HALF_DTYPES = tuple(precision.dtype for precision in PRECISIONS.values() if precision.is_half)
"""Types of less than float32."""

ROUNDED_OPERANDS = "rounded_operands"
"""Attribute of a Relax function whose operands were rounded for a precision: the name of the half type."""
