"""A general pass: an exported program with complex tensors becomes one in real arithmetic.

    lowered = lower_complex(program)          # torch.export.ExportedProgram in and out
    call = complex_call(program, lowered)     # takes and returns complex tensors, as the module did

Calling convention of the lowered program: a complex input or output of shape [...] is a real tensor of shape [..., 2],
real part first (the layout of torch.view_as_real); all others are as they were. A complex parameter, buffer or constant
`name` is two real ones, `name_real` and `name_imag`.

Inside, a complex value is a pair of real tensors, so that products, sums and moves are plain real operators, which TVM
fuses; the parts are interleaved only where the program says torch.view_as_real, and at its outputs.

The values are PyTorch's up to rounding, for finite numbers. Infinite and not-a-number parts follow the real formulas,
which differ in two places: a real operand is not first extended by a zero imaginary part (∞·0 does not arise), and x/0
is not-a-number in both parts.

Why not `torch._subclasses.complex_tensor.ComplexTensor` (PyTorch 2.15), which has rules for more operators: see
`docs/TVM_ROPE_RESEARCH.md`.
"""

from harness.frontend.complex.calling import as_complex, as_real, complex_call
from harness.frontend.complex.errors import ComplexOperatorError
from harness.frontend.complex.lowering import lower_complex

__all__ = ["ComplexOperatorError", "as_complex", "as_real", "complex_call", "lower_complex"]
