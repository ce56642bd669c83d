"""From a candidate of MetaSchedule to a library, and a task's inputs with the result that is expected of it."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax, s_tir, tirx

from harness.tuning.measuring import Program, RunError, Step
from harness.tuning.rules_module import LAYOUT_FREE
from harness.tuning.worker import Worker

Array = npt.NDArray[Any]

_SPATIAL, _REDUCED = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


def split_layout(module: tvm.IRModule) -> tuple[tvm.IRModule, tuple[Step, ...], Step]:
    """Takes apart what a candidate does to its weights when the model is loaded and what it does in every run.

    Args:
        module: A function `main`, scheduled or not.

    Returns:
        Functions to build; the steps that lay weights out; the step to time. Values are numbered as in `Program`.
    """
    function = module["main"].without_attr("global_symbol")
    *inputs, result = function.params
    weights = {int(position) for position in function.attrs.get(LAYOUT_FREE, ())}
    builder = relax.BlockBuilder()
    kernel = builder.add_func(function, "kernel")
    variables = [relax.Var(f"a{n}", _type(parameter)) for n, parameter in enumerate(inputs)]
    order = [n for n in range(len(inputs)) if n not in weights] + sorted(weights)
    with builder.function("main", [variables[n] for n in order], {"num_input": len(inputs) - len(weights)}):
        with builder.dataflow():
            output = builder.emit_output(relax.call_tir(kernel, variables, out_ty=_type(result)))
        builder.emit_func_output(output)
    scheduled = relax.transform.SplitLayoutRewritePreproc()(builder.get())
    steps: list[Step] = []
    numbers = {variable.name: n for n, variable in enumerate(variables)}
    for block in scheduled["main"].body.blocks:
        for binding in block.bindings:
            name, value = binding.var.name, binding.value
            if isinstance(value, relax.Var):
                numbers[name] = numbers[value.name]
            elif isinstance(value, relax.TupleGetItem):
                numbers[name] = numbers[value.tuple_value.name]
            else:
                callee, arguments = value.args
                results = (
                    list(binding.var.ty.fields) if isinstance(binding.var.ty, relax.TupleType) else [binding.var.ty]
                )
                if len(results) > 1:
                    return _whole(module)
                read = tuple(numbers[argument.name] for argument in arguments.fields)
                shape = tuple(int(extent) for extent in results[0].shape)
                numbers[name] = len(inputs) + len(steps)
                steps.append(Step(callee.name_hint, read, shape, str(results[0].dtype)))
    kernels = {v: f for v, f in scheduled.functions.items() if isinstance(f, tirx.PrimFunc)}
    named = {v: f.with_attr("global_symbol", v.name_hint) for v, f in kernels.items()}
    return tvm.IRModule(named), tuple(steps[:-1]), steps[-1]


def _whole(module: tvm.IRModule) -> tuple[tvm.IRModule, tuple[Step, ...], Step]:
    """A function that lays several weights out does so in every run."""
    *inputs, result = module["main"].params
    shape = tuple(int(extent) for extent in result.shape)
    return module, (), Step("main", tuple(range(len(inputs))), shape, str(result.dtype))


def build_programs(
    modules: Sequence[tvm.IRModule], target: tvm.target.Target, jobs: int, seconds: float = 30.0
) -> list[Program | str]:
    """Builds scheduled functions side by side in worker processes.

    Args:
        modules: Functions `main`.
        target: What to generate code for.
        jobs: Number of processes.
        seconds: Limit for one.

    Returns:
        For each, the program, alone in a new temporary folder, or one line about why there is none.
    """
    # New ones each time: a process that compiles much grows.
    workers = [Worker() for _ in range(min(jobs, len(modules)))]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def one(module: tvm.IRModule, functions: tvm.IRModule, load: tuple[Step, ...], run: Step) -> Program | str:
        library = Path(tempfile.mkdtemp(prefix="sam3-tvm-rules-")) / "candidate.so"
        worker = idle.get()
        try:
            worker.run(_build, functions, str(target), str(library), seconds=seconds)
        except RunError as error:
            shutil.rmtree(library.parent, ignore_errors=True)
            return str(error)
        finally:
            idle.put(worker)
        return Program(library, load, (run,), len(module["main"].params) - 1 + len(load))

    threads = ThreadPoolExecutor(max(1, len(workers)))
    try:
        building = [threads.submit(one, module, *split_layout(module)) for module in modules]
        return [future.result() for future in building]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()


def _build(functions: tvm.IRModule, target: str, library: str) -> None:
    from harness.targets.generating import generate
    from harness.targets.linking import link

    built = generate(lambda chosen: tvm.tirx.build(functions, chosen), tvm.target.Target(target))
    built.export_library(library, fcompile=link)


def reference_module(module: tvm.IRModule) -> tvm.IRModule:
    """The plain loops in an order that is bearable to wait for: outer ones parallel, sums outside the last axis.

    Every sum is still added up term by term in the same order, so the rounding is that of the plain loops.
    """
    sch = s_tir.Schedule(module, debug_mask="none")
    for block in sch.get_child_blocks(sch.get_sblock("root", func_name="main")):
        loops, axes = sch.get_loops(block), sch.get(block).iter_vars
        if len(loops) != len(axes) or {axis.iter_type for axis in axes} - {_SPATIAL, _REDUCED}:
            continue
        spatial = [loop for loop, axis in zip(loops, axes, strict=True) if axis.iter_type == _SPATIAL]
        reduced = [loop for loop, axis in zip(loops, axes, strict=True) if axis.iter_type == _REDUCED]
        if len(spatial) < 2:
            continue
        if reduced:
            sch.reorder(*spatial[:-1], *reduced, spatial[-1])
        sch.parallel(spatial[0] if len(spatial) == 2 else sch.fuse(*spatial[:-1]))
        if reduced:
            sch.decompose_reduction(block, reduced[0])
    return sch.mod


def seeded_inputs(module: tvm.IRModule, seed: int) -> list[Array]:
    """What to call a function on: standard normal numbers, scaled so that sums of products stay of order one.

    A sum of K products of numbers of size s has size s²·√K; the K that counts is the longest sum of the function.
    Integers and booleans are zero: they may be indices.
    """
    generator = np.random.default_rng(seed)
    scale = np.float32(longest_sum(module) ** -0.25)
    arrays = []
    for parameter in module["main"].params[:-1]:
        shape, dtype = tuple(int(extent) for extent in parameter.shape), np.dtype(str(parameter.dtype))
        if dtype.kind == "f":
            arrays.append((generator.standard_normal(shape, np.float32) * scale).astype(dtype))
        else:
            arrays.append(np.zeros(shape, dtype))
    return arrays


def longest_sum(module: tvm.IRModule) -> int:
    """The largest number of terms that one element of a block sums up; 1 if there is no reduction."""
    longest = 1

    def visit(node: Any) -> None:
        nonlocal longest
        if isinstance(node, s_tir.SBlock):
            extents = [
                int(axis.dom.extent)
                for axis in node.iter_vars
                if axis.iter_type == _REDUCED and isinstance(axis.dom.extent, tirx.IntImm)
            ]
            longest = max(longest, math.prod(extents))

    _walk(module["main"].body, visit)
    return longest


def _walk(body: Any, visit: Callable[[Any], None]) -> None:
    import tvm_ffi

    tvm_ffi.structural_walk(body, visit)


def _type(parameter: Any) -> relax.TensorType:
    return relax.TensorType([int(extent) for extent in parameter.shape], str(parameter.dtype))
