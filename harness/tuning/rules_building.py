"""From a candidate of MetaSchedule to a library, and a task's inputs with the result that is expected of it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax, s_tir, tirx
from tvm.s_tir import meta_schedule as ms

from harness.tuning.measuring import Program, Step
from harness.tuning.rules_module import LAYOUT_FREE

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


def build(module: tvm.IRModule, target: tvm.target.Target, _params: Any = None) -> Any:
    """Generates code; what MetaSchedule's builder calls in its worker processes."""
    return tvm.tirx.build(module, target)


def export(library: Any) -> str:
    """Writes the library into a new temporary folder; what MetaSchedule's builder calls after `build`."""
    from harness.targets.linking import link

    path = Path(tempfile.mkdtemp(prefix="sam3-tvm-rules-")) / "candidate.so"
    library.export_library(str(path), fcompile=link)
    return str(path)


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
        For each, the program, or one line about why there is none.
    """
    parts = [split_layout(module) for module in modules]
    builder = ms.builder.LocalBuilder(max_workers=jobs, timeout_sec=seconds, f_build=build, f_export=export)
    built = builder.build([ms.builder.BuilderInput(functions, target) for functions, _, _ in parts])
    programs: list[Program | str] = []
    for (_, load, run), module, done in zip(parts, modules, built, strict=True):
        if done.artifact_path is None:
            programs.append(str(done.error_msg).strip().splitlines()[-1])
        else:
            values = len(module["main"].params) - 1 + len(load)
            programs.append(Program(Path(str(done.artifact_path)), load, (run,), values))
    return programs


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
