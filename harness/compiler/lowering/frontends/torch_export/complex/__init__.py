"""Lowers an exported program with complex tensors to a program in real arithmetic, by a general pass.

    lowered = lower_complex(program)          # torch.export.ExportedProgram in and out

Calling convention of the lowered program: a complex input, output, parameter, buffer or constant of shape [...] is a
real tensor of shape [..., 2], real part first (the layout of torch.view_as_real); real ones are unchanged.

Inside, a complex value is a pair of real tensors, so that products, sums and moves are plain real operators, which TVM
fuses; the parts are interleaved only where the program calls torch.view_as_real, and at its outputs.

The values are PyTorch's up to rounding, for finite numbers. Infinite and not-a-number parts follow the real formulas,
which differ in two places: a real operand is not first extended by a zero imaginary part (∞·0 does not arise), and the
parts of x/0 are those of x divided by 0.

A complex tensor that depends on no input, such as a table that torch.polar makes of a range, is computed by PyTorch and
becomes a constant.

PyTorch 2.15 has the private `torch._subclasses.complex_tensor.ComplexTensor`, which has rules for more operators: all
of 300 drawn programs (`complex_programs.py` of the tests) run on it within their bounds. This pass does not use it:

- It is a tensor, not a pass: it must be in the module's buffers and inputs before torch.export. Tensors that the
  program makes with view_as_complex, polar or complex from real tensors stay complex in the exported graph;
  constructing a ComplexTensor in forward fails in torch.export ("Unable to cast NotImplemented to Tensor").
- Over an ExportedProgram it needs an interpreter, rules for those operators, and all of the signature, which is most of
  this package; every value is made contiguous and aliased on the way.
- Division and reciprocal square the divisor: not a number at 1e30 and infinite at 1e-30 in complex64. exp overflows at
  89 + 1.57i, where the result is finite. Real operands are extended by zeros: twice the products.
- It may change or disappear in any release.
"""

from harness.compiler.lowering.frontends.torch_export.complex.lowering import lower_complex
from harness.compiler.lowering.frontends.torch_export.complex.values import ComplexOperatorError, as_real

__all__ = ["ComplexOperatorError", "as_real", "lower_complex"]
