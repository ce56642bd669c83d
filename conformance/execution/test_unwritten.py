"""An element that compiled code leaves out is NaN where a case is run, whatever memory holds there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from harness.compiler.execution.executors import LocalExecutor
from harness.compiler.schedules.common.vm import lower_to_vm
from harness.compiler.schedules.cpu.memory import plan_memory
from harness.compiler.targets import HOST


@I.ir_module
class LeavesOut:
    """Doubles x twice, but for the last element of the first doubling."""

    @T.prim_func(private=True, s_tir=True)
    def first(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        T.func_attr({"tirx.noalias": True})
        for n in range(63):
            with T.sblock("y"):
                i = T.axis.spatial(63, n)
                y[i] = x[i] * T.float32(2)

    @T.prim_func(private=True, s_tir=True)
    def second(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
        T.func_attr({"tirx.noalias": True})
        for n in range(64):
            with T.sblock("y"):
                i = T.axis.spatial(64, n)
                y[i] = x[i] * T.float32(2)

    @R.function
    def main(x: R.Tensor((64,), "float32")):
        cls = LeavesOut
        with R.dataflow():
            y = R.call_tir(cls.first, (x,), out_ty=R.Tensor((64,), "float32"))
            z = R.call_tir(cls.second, (y,), out_ty=R.Tensor((64,), "float32"))
            both = (y, z)
            R.output(both)
        return both


def test_an_element_that_is_left_out_is_nan(tmp_path: Path) -> None:
    with HOST.tvm_target():
        tvm.relax.build(lower_to_vm(plan_memory)(LeavesOut), HOST.tvm_target(), relax_pipeline=None).export_library(
            str(tmp_path / "program.so")
        )
    x = np.arange(64, dtype=np.float32)
    y, z = LocalExecutor().load_program(tmp_path / "program.so", HOST.name, []).run([x])
    np.testing.assert_array_equal(y, np.append(2 * x[:-1], np.nan))
    np.testing.assert_array_equal(z, 2 * y)
