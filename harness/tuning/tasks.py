"""Tasks: the workloads of a component that can be tuned, how often each runs, and each as a program of its own.

A task is rebuilt from its workload alone, so a machine that measures it needs neither SAM 3 nor its weights. Its
program is a Relax module with one operator, inputs from a seed, and the same operator in PyTorch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import ir, relax, tirx

from harness.core.budget import Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.processors import Processors
from harness.schedules import Schedule
from harness.schedules.cpu.bf16 import BF16, with_half_products
from harness.schedules.cpu.pipeline import to_loops
from harness.schedules.cpu.rewrite import workloads
from harness.schedules.cpu.schedule import Attention, Convolution, Product, TransposedConvolution, Workload
from harness.tuning.measuring import Array, Program, Step

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Task:
    """A workload that can be tuned.

    Attributes:
        workload: The workload.
        calls: How often it is computed in one run of each component that the task was collected from.
    """

    workload: Workload
    calls: int

    @property
    def key(self) -> str:
        """The key under which the database knows the task."""
        return self.workload.key

    @property
    def dtype(self) -> str:
        """Type of what the task multiplies."""
        return self.workload.dtype


def tasks_of(module: tvm.IRModule, target: tvm.target.Target) -> list[Task]:
    """Returns the tasks of an imported module, in the order in which they first occur."""
    found = workloads(module, target)
    count = Counter(workload.key for workload in found)
    return [Task(workload, count[key]) for key, workload in {workload.key: workload for workload in found}.items()]


def merge_tasks(groups: Iterable[Sequence[Task]], names: str) -> list[Task]:
    """Merges the tasks of several modules, each of which runs once.

    Args:
        groups: The tasks of each module.
        names: Names of the modules, for the error's sentence.

    Raises:
        HarnessError: There are no tasks.
    """
    found: dict[str, Task] = {}
    for task in (task for group in groups for task in group):
        known = found.get(task.key)
        found[task.key] = task if known is None else replace(known, calls=known.calls + task.calls)
    if not found:
        raise HarnessError(
            f"{names}: nothing to tune, no product, convolution or attention has a kernel with a choice of schedules; "
            "in half precision that takes a CPU with an instruction for it"
        )
    return list(found.values())


def component_tasks(request: tuple[Case, Processors, Groups], on_stage: Callable[[str], None]) -> list[Task]:
    """Returns the tasks of a component's main sample for processors; `harness.processes` calls this function."""
    from harness.models.importing import imported_module
    from harness.schedules.cpu.widening import widen
    from harness.targets import TARGETS

    case, processors, float32 = request
    module = widen()(imported_module(case, on_stage, float32))
    return tasks_of(module, TARGETS[case.target].tvm_target(processors))


@dataclass(frozen=True)
class IsolatedTask:
    """A workload as a program of its own.

    Attributes:
        inputs: Shape and dtype of each tensor that changes with every call.
        weights: Shape and dtype of each tensor that is known when the model is loaded.
        relax: Makes a Relax expression of the tensors, which rounds what the workload rounds.
        torch: Computes the same in PyTorch: of float32 tensors under autocast if the workload multiplies a half type.
        scales: Standard deviation of each tensor's elements, chosen so that results are about 1.
    """

    inputs: tuple[tuple[tuple[int, ...], str], ...]
    weights: tuple[tuple[tuple[int, ...], str], ...]
    relax: Callable[..., relax.Expr]
    torch: Callable[..., torch.Tensor]
    scales: tuple[float, ...]


def isolated(workload: Workload) -> IsolatedTask:
    """Returns a workload as a program of its own."""
    form = _ISOLATED[type(workload)](workload)
    return form if workload.dtype == "float32" else replace(form, torch=_under_autocast(form.torch, workload.dtype))


def _under_autocast(compute: Callable[..., torch.Tensor], dtype: str) -> Callable[..., torch.Tensor]:
    """Returns the same in PyTorch under autocast, which leaves float64 alone; the result is no half type."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        with _torch().autocast("cpu", getattr(_torch(), dtype)):
            result = compute(*tensors)
        return result if result.dtype == _torch().float64 else result.float()

    return run


def module_of(workload: Workload) -> tvm.IRModule:
    """Returns the workload as a Relax module with the function `main`."""
    form = isolated(workload)
    builder = relax.BlockBuilder()
    parameters = [
        relax.Var(f"x{n}", relax.TensorType(list(shape), dtype))
        for n, (shape, dtype) in enumerate((*form.inputs, *form.weights))
    ]
    with builder.function("main", parameters, attrs={"num_input": len(form.inputs)}):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(form.relax(*parameters)))
        builder.emit_func_output(result)
    return builder.get()


def arrays_of(workload: Workload, seed: int = 0) -> list[Array]:
    """Returns the inputs and weights of a workload: normally distributed numbers that depend on the seed alone."""
    form = isolated(workload)
    generator = np.random.default_rng(seed)
    arrays: list[Array] = []
    for (shape, dtype), scale in zip((*form.inputs, *form.weights), form.scales, strict=True):
        if dtype == "bool":
            arrays.append(generator.random(shape) < 0.9)
        else:
            values = generator.standard_normal(shape, np.float32) * np.float32(scale)
            arrays.append(values.astype(dtype, copy=False))
    return arrays


def build(workload: Workload, schedule: Schedule, target: tvm.target.Target, library: Path) -> Program:
    """Compiles a workload as a program of its own.

    Args:
        workload: The workload.
        schedule: Decisions about its kernel; what it does not name keeps its default.
        target: TVM's target, a CPU.
        library: File to write; its name ends in `.so`.

    Raises:
        HarnessError: The schedule cannot be used.
        RuntimeError: There is no linker, or the compiler fails.
    """
    from harness.schedules.common.code_generation import generate
    from harness.targets.compiling import export_library

    form = isolated(workload)
    module = to_loops(module_of(workload), target, {workload.key: schedule})
    functions = {
        variable.name_hint: function.with_attr("global_symbol", variable.name_hint)
        for variable, function in module.functions_items()
        if isinstance(function, tirx.PrimFunc)
    }
    loops = tvm.IRModule(functions)
    with target, tvm.transform.PassContext(opt_level=3):
        export_library(generate(lambda chosen: tvm.tirx.build(loops, chosen), target), target, library)
    given = len(form.inputs) + len(form.weights)
    names = {variable.name_hint for variable in module.get_global_vars()}
    load: tuple[Step, ...] = ()
    transformed = list(range(len(form.inputs), given))
    if _LOAD in names:
        load, transformed = _steps(module[_LOAD], [transformed], given)
    arguments = [*range(len(form.inputs)), *transformed]
    run, result = _steps(module["main"], arguments, given + len(load))
    return Program(library, load, run, result[0])


_LOAD = "main_transform_params"


def _steps(function: relax.Function, arguments: Sequence[Any], first: int) -> tuple[tuple[Step, ...], list[int]]:
    """Lists the calls of a function.

    Args:
        function: A function that only calls compiled functions.
        arguments: Number of the value of each parameter; a list of numbers for a tuple.
        first: Number of the first value that the function computes.

    Returns:
        The calls, and the numbers of its results.
    """
    known: dict[relax.Var, Any] = dict(zip(function.params, arguments, strict=True))
    steps: list[Step] = []

    def number(value: relax.Expr) -> Any:
        if isinstance(value, relax.Var):
            return known[value]
        if isinstance(value, relax.TupleGetItem):
            return number(value.tuple_value)[value.index]
        if isinstance(value, relax.Tuple):
            return [number(item) for item in value.fields]
        if isinstance(value, ir.Call) and getattr(value.op, "name", None) == "relax.call_tir":
            result = value.ty_args[0]
            shape = tuple(int(extent) for extent in result.shape)
            steps.append(Step(value.args[0].name_hint, tuple(number(value.args[1])), shape, str(result.dtype)))
            return first + len(steps) - 1
        raise RuntimeError(f"a task is more than calls of kernels: {value}")

    for block in function.body.blocks:
        for binding in block.bindings:
            known[binding.var] = number(binding.value)
    result = number(function.body.body)
    return tuple(steps), result if isinstance(result, list) else [result]


def _product(task: Product) -> IsolatedTask:
    extents = task.extents
    matrices = task.matrices
    batch = (extents.batch // matrices, matrices) if 1 < matrices < extents.batch else (extents.batch,)
    own = (1, matrices) if len(batch) == 2 else (matrices,)
    streaming_left = task.streaming == "left"
    left, right = (extents.rows, extents.depth), (extents.depth, extents.columns)
    moving, staying = (left, right) if streaming_left else (right, left)
    # As PyTorch stores the weights of a linear layer.
    kept = staying[::-1] if streaming_left else staying
    streamed = moving[::-1] if task.transposed else moving

    def operands(x: Any, w: Any, swapped: Callable[[Any], Any]) -> tuple[Any, Any]:
        x = swapped(x) if task.transposed else x
        w = swapped(w) if streaming_left else w
        return (x, w) if streaming_left else (w, x)

    def swap(tensor: relax.Expr) -> relax.Expr:
        rank = len(batch) + 2
        return relax.op.permute_dims(tensor, [*range(rank - 2), rank - 1, rank - 2])

    one = ((*batch, *streamed), "float32")
    two = ((*own, *kept), "float32")
    return IsolatedTask(
        (one,) if task.at_load else (one, two),
        (two,) if task.at_load else (),
        lambda x, w: _noted(task, relax.op.matmul(*operands(x, w, swap))),
        lambda x, w: _torch().matmul(*operands(x, w, lambda tensor: tensor.mT)),
        (1.0, extents.depth**-0.5),
    )


def _convolution(task: Convolution) -> IsolatedTask:
    window = task.window
    weight = ((window.result[1], window.channels, *window.kernel), "float32")
    image = (window.image, "float32")
    before = window.padding
    after = tuple(
        (out - 1) * stride + (kernel - 1) * dilation + 1 - extent - pad
        for out, stride, kernel, dilation, extent, pad in zip(
            window.result[2:],
            window.strides,
            window.kernel,
            window.dilation,
            window.image[2:],
            before,
            strict=True,
        )
    )
    after = (max(0, after[0]), max(0, after[1]))
    options = {"dilation": window.dilation, "groups": window.groups}

    def in_relax(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return _noted(task, relax.op.nn.conv2d(x, w, strides=window.strides, padding=(*before, *after), **options))

    def in_torch(x: Any, w: Any) -> Any:
        functional = _torch().nn.functional
        if before == after:
            return functional.conv2d(x, w, stride=window.strides, padding=before, **options)
        padded = functional.pad(x, (before[1], after[1], before[0], after[0]))
        return functional.conv2d(padded, w, stride=window.strides, **options)

    return IsolatedTask(
        (image,) if task.at_load else (image, weight),
        (weight,) if task.at_load else (),
        in_relax,
        in_torch,
        (1.0, window.depth**-0.5),
    )


def _transposed(task: TransposedConvolution) -> IsolatedTask:
    image, weight = (task.image, "float32"), (task.weight, "float32")
    strides = task.weight[2:]
    return IsolatedTask(
        (image,) if task.at_load else (image, weight),
        (weight,) if task.at_load else (),
        lambda x, w: _noted(task, relax.op.nn.conv2d_transpose(x, w, strides=strides)),
        lambda x, w: _torch().nn.functional.conv_transpose2d(x, w, stride=strides),
        (1.0, task.weight[0] ** -0.5),
    )


def _attention(task: Attention) -> IsolatedTask:
    sizes = ((task.queries, task.channels), (task.keys, task.channels), (task.keys, task.width))
    inputs: list[tuple[tuple[int, ...], str]] = [
        ((task.batch, length, task.heads, channels), "float32") for length, channels in sizes
    ]
    if task.bias is not None:
        inputs.append((task.bias_shape, task.bias))
    causal = "BottomRight" if task.causal else None

    def in_relax(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        return _noted(task, relax.op.nn.attention(q, k, v, *bias, causal_mask=causal))

    def in_torch(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        if task.causal:
            corner = _torch().ones(task.queries, task.keys, dtype=_torch().bool).tril(task.keys - task.queries)
            bias = corner if bias is None else _torch().where(corner, bias, -math.inf)
        scores = _torch().nn.functional.scaled_dot_product_attention
        if q.dtype == _torch().float64:
            # Not all heads at once: the matrix of scores is large.
            bias = None if bias is None else bias.expand(task.batch, task.heads, -1, -1)
            each = [
                scores(*(tensor[:, h : h + 1] for tensor in heads), None if bias is None else bias[:, h : h + 1])
                for h in range(task.heads)
            ]
            return _torch().cat(each, 1).transpose(1, 2)
        return scores(*heads, bias).transpose(1, 2)

    return IsolatedTask(tuple(inputs), (), in_relax, in_torch, (1.0,) * len(inputs))


def _noted(task: Workload, operator: ir.Call) -> ir.Call:
    """Returns the operator with the note that its kernel may round operands, if the task does."""
    return with_half_products(operator) if task.dtype == BF16 else operator


def _torch() -> Any:
    import torch

    return torch


_ISOLATED: dict[type, Callable[[Any], IsolatedTask]] = {
    Product: _product,
    Convolution: _convolution,
    TransposedConvolution: _transposed,
    Attention: _attention,
}
