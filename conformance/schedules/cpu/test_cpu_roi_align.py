"""What the kernel of `roi_align` works around; that it is right is shown by `test_operators.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from conformance.support.kernels import call_function
from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.schedules.cpu.reduction import scalar


def on_a_line(kept: Callable[[Any], Any]) -> np.ndarray:
    """Four places in steps from 3 to 4, as samples in a bin are; `kept` makes a value one that is computed once."""

    def body(ends: tirx.Buffer, out: tirx.Buffer) -> None:
        start = kept(ends[0])
        length = kept(ends[1] - start)
        with T.serial(0, 4) as i:
            T.buffer_store(out, kept(start + T.cast(i, "float32") * length), [i])

    function = prim_func("main", [Argument("ends", (2,)), Argument("out", (4,))], body)
    return call_function(function, np.array([3, 4], np.float32), 4)


def test_fp32_values_that_are_kept_in_memory():
    assert on_a_line(scalar).tolist() == [3, 4, 5, 6]


@pytest.mark.xfail(
    strict=True, raises=ValueError, reason="TVM's simplifier makes an integer of a factor of bound fp32 values"
)
def test_fp32_values_that_are_bound():
    assert on_a_line(T.Bind).tolist() == [3, 4, 5, 6]
