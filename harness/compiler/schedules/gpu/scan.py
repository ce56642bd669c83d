"""Computes running sums: threads of a block sum parts of a line, each starting from the parts before, in fp32.

TVM's own kernel (`tvm.relax.backend.gpu_generic.gpu_2d_continuous_cumsum`) has no barrier between a thread's write to
shared memory and its neighbours' reads in the scan of a warp: it is right only where the warp runs in lockstep, which
CUDA does not promise since sm_70.
"""

from __future__ import annotations

import math

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, around, call_on_views, static_shape
from harness.compiler.schedules.common.kernel import Argument, ceil_div, prim_func
from harness.compiler.schedules.common.kernel_info import kernel
from harness.compiler.schedules.gpu.threads import barrier, fp32, launch, local, power_of_two, shared

_EACH = 8
"""Least number of elements of a line for a thread."""
_THREADS = 256
"""Largest number of threads that share a line."""


def cumsum_kernel(outer: int, count: int, inner: int, exclusive: bool) -> T.PrimFunc:
    """Builds running sums over the middle of [outer, count, inner], with or without the element itself."""
    threads = min(_THREADS, power_of_two(ceil_div(count, _EACH)))
    part = ceil_div(count, threads)

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with launch(outer * inner, threads) as (line, thread):
            i, j = line // inner, line % inner
            totals, running = shared(threads), local(1)

            def walk(store: bool) -> None:
                with T.serial(0, part) as n:
                    k = T.Bind(thread * part + n)
                    with T.If(k < count), T.Then():
                        if store and exclusive:
                            T.buffer_store(out, running[0], [i, k, j])
                        T.buffer_store(running, running[0] + data[i, k, j], [0])
                        if store and not exclusive:
                            T.buffer_store(out, running[0], [i, k, j])

            T.buffer_store(running, fp32(0.0), [0])
            walk(store=False)
            T.buffer_store(totals, running[0], [thread])
            barrier()
            T.buffer_store(running, fp32(0.0), [0])
            with T.serial(0, threads) as preceding, T.If(preceding < thread), T.Then():
                T.buffer_store(running, running[0] + totals[preceding], [0])
            walk(store=True)

    shape = (outer, count, inner)
    info = kernel("cumsum", lines=outer * inner, count=count)
    return prim_func("cumsum", [Argument("data", shape), Argument("out", shape)], body, info)


def _cumsum(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    data, attrs = node.args[0], node.attrs
    shape = static_shape(data)
    if not shape or math.prod(shape) == 0 or attrs.axis is None or static_shape(node) is None:
        return node  # for DispatchSortScan
    view = around(shape, int(attrs.axis))
    function = cumsum_kernel(*view, bool(attrs.exclusive))
    return call_on_views(bb, f"cumsum_{'x'.join(map(str, view))}", function, [data], shape)


LEGALIZE: dict[str, Legalize] = {"relax.cumsum": _cumsum}
"""Legalizations of fp32 scans of static shape, by operator."""
