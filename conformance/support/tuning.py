"""Tuning for tests: databases of what was never measured, and what PyTorch computes of a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tvm import relax

from harness.compiler.schedules import Schedule
from harness.compiler.schedules.cpu.schedule import Workload
from harness.compiler.tuned.database import Database, Record, current_conditions
from harness.tuning.kernels import arrays_of, module_of


def record(task: str, schedule: Schedule, **others: Any) -> Record:
    """A record under the conditions of this process."""
    values = {
        "conditions": current_conditions("llvm"),
        "seconds": 0.5,
        "default_seconds": 0.75,
        "trials": 20,
        "machine": "a machine",
        "date": "2026-01-02T03:04:05+00:00",
    }
    return Record(task, schedule, **(values | others))


def database_of(folder: Path, *records: Record, target: str = "llvm") -> Database:
    """A database with these records alone."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Database(folder, target)
    for one in records:
        made = made.store(one)
    return made


def torch_result(workload: Workload, exact: bool = False) -> np.ndarray:
    """What PyTorch computes of a workload alone: in float32, under autocast if its type is half, or in float64."""
    function = module_of(workload)["main"]
    tensors = [torch.from_numpy(array) for array in arrays_of(workload)]
    if exact:
        tensors = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    values: dict[relax.Var, torch.Tensor] = dict(zip(function.params, tensors, strict=True))
    half = workload.dtype != "float32" and not exact
    with torch.autocast("cpu", getattr(torch, workload.dtype) if half else None, enabled=half):
        for binding in function.body.blocks[0].bindings:
            value = binding.value
            if isinstance(value, relax.Var):
                values[binding.var] = values[value]
            else:
                operands = [values[argument] for argument in value.args]
                values[binding.var] = _OPERATORS[value.op.name.removeprefix("relax.")](value.attrs, *operands)
    result = values[function.body.body]
    return (result if exact else result.float()).numpy()


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


def _convolution(attrs: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    top, left, bottom, right = _numbers(attrs.padding)
    strides, dilation = _numbers(attrs.strides), _numbers(attrs.dilation)
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    return torch.nn.functional.conv2d(padded, w, stride=strides, dilation=dilation, groups=int(attrs.groups))


def _attention(
    attrs: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    if attrs.causal_mask:
        queries, keys = q.shape[1], k.shape[1]
        bias = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return torch.nn.functional.scaled_dot_product_attention(*heads, bias).transpose(1, 2)


_OPERATORS: dict[str, Any] = {
    "matmul": lambda _attrs, a, b: torch.matmul(a, b),
    "permute_dims": lambda attrs, a: a.permute(_numbers(attrs.axes)),
    "nn.conv2d": _convolution,
    "nn.conv2d_transpose": lambda attrs, x, w: torch.nn.functional.conv_transpose2d(
        x, w, stride=_numbers(attrs.strides)
    ),
    "nn.attention": _attention,
    "nn.attention_bias": _attention,
}
