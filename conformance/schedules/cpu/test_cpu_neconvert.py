"""Linear layers in bfloat16 on processors that load bfloat16 numbers as fp32: what they compute, what LLVM emits."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from conformance.schedules.cpu.test_cpu_bf16 import extreme, runs
from conformance.support.assembly import assembly, innermost_loops
from conformance.support.bf16 import Processor, linear, product, rounded
from conformance.support.cpus import target_for
from conformance.support.kernels import functions_of, lowered, run
from conformance.support.operators import normal

CPU = "sierraforest"
KERNEL = "matmul_bf16_vcvtne"


def of_columns(x: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """A layer whose rows lie across memory, so that whole panels cannot be packed."""
    return linear(relax.op.permute_dims(x), weight)


@runs(CPU)
@pytest.mark.parametrize(("columns", "depth"), [(260, 256), (37, 62), (8, 1250)])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_linear_layer_is_what_numpy_emulates(rows: int, columns: int, depth: int) -> None:
    x, weight = normal((depth, rows)), rounded(normal((columns, depth), 1))
    assert functions_of(lowered(of_columns, [x], [weight], target_for(CPU)))[0] == KERNEL
    actual = run(of_columns, [x], [weight], target_for(CPU))
    np.testing.assert_array_equal(actual, product(x.T, weight, Processor()))


@runs(CPU)
def test_denormals_infinities_and_nan() -> None:
    x, weight = extreme((2, 600), 0), rounded(extreme((70, 2), 1))
    np.testing.assert_array_equal(run(of_columns, [x], [weight], target_for(CPU)), product(x.T, weight, Processor()))


def test_whole_panels_are_integers_all_the_same() -> None:
    def name(rows: int, cpu: str) -> str:
        return functions_of(lowered(linear, [normal((rows, 64))], [rounded(normal((16, 64)))], target_for(cpu)))[0]

    assert [name(rows, CPU) for rows in (1, 2)] == [KERNEL, "matmul_bf16_vpmaddwd"]
    assert [name(1, cpu) for cpu in ("alderlake", "diamondrapids")] == ["matmul_bf16", "matmul_bf16"]


@pytest.mark.parametrize("cpu", [CPU, "lunarlake"])
@pytest.mark.parametrize(("rows", "of_tile"), [(1, 1), (37, 4)])
def test_a_pair_is_loaded_once_for_all_rows_of_a_tile(cpu: str, rows: int, of_tile: int) -> None:
    target, weight = target_for(cpu), rounded(normal((96, 256)))
    loops = innermost_loops(assembly(lowered(of_columns, [normal((256, rows))], [weight], target), target))
    multiplying = [loop for loop in loops if any(i.operation.startswith("vfmadd") for i in loop)]
    assert multiplying
    for loop in multiplying:
        shown = "\n".join(i.text for i in loop)
        operations = [i.operation for i in loop]
        products = sum(name.startswith("vfmadd") for name in operations)
        loads = [operations.count(name) for name in ("vcvtneebf162ps", "vcvtneobf162ps")]
        assert {2 * of_tile * count for count in loads} == {products}, shown
        assert not any(i.spills for i in loop), shown
        assert not {"vpslld", "vpand", "vandps"} & {*operations}, shown
