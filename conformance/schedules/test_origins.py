"""Operators keep their identity where a kernel computes several: a product on GPUs that reads a transposed operand."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from harness.compiler.schedules.common.provenance import LoweringKind, trace
from harness.compiler.targets import TARGETS
from harness.core.processors import Processors


def test_a_transposition_belongs_to_the_product_that_reads_it_alone() -> None:
    x, weight, other = (relax.Var(name, relax.TensorType([23, 46], "float32")) for name in ("x", "weight", "other"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, weight, other]):
        with builder.dataflow():
            folded = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight))))
            shared = builder.emit(op.permute_dims(other))
            product, exponential = builder.emit(op.matmul(x, shared)), builder.emit(op.exp(shared))
            result = builder.emit_output(relax.Tuple([folded, product, exponential]))
        builder.emit_func_output(result)
    cuda = TARGETS["cuda"]
    target = cuda.tvm_target(Processors(cuda="sm_80"))
    alone, first, together, second, _ = trace(builder.get(), cuda.pipeline(target, {}), target)
    assert (alone.how, alone.functions) == (LoweringKind.FOLDED, first.functions)
    assert alone.beside == first.beside == ("permute_dims", "matmul")
    assert (together.how, together.beside) == (LoweringKind.DEFAULT, ("permute_dims", "exp"))
    assert (first.how, second.how, second.beside) == (LoweringKind.KERNEL, LoweringKind.KERNEL, ("matmul",))
