"""Defines the defects of TVM's backend, which the programs of both frontends meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom, normal
from harness.compiler.lowering.frontends.rewriting import calls, value_of

_aten = torch.ops.aten
_LOGICAL_OPERATORS: dict[Any, Any] = {
    _aten.add.Tensor: _aten.logical_or.default,
    _aten.mul.Tensor: _aten.logical_and.default,
}


def _to_logic(module: GraphModule) -> None:
    """Replaces sums and products of booleans by `or` and `and`, which is what PyTorch computes."""
    for node in calls(module, *_LOGICAL_OPERATORS):
        if value_of(node).dtype == torch.bool and all(isinstance(operand, Node) for operand in node.args):
            node.target = _LOGICAL_OPERATORS[node.target]


BOOLEAN_SUM = Defect(
    name="boolean_sum",
    title="Adding or multiplying boolean tensors is rejected",
    location="LLVM code generation of tirx.Add and tirx.Mul",
    description="There is no sum and no product of booleans. PyTorch's are `or` and `and`.",
    function=lambda x, y: (x + y) * x,
    args=(torch.tensor([True, False]), torch.tensor([True, True])),
    raw=RawOutcome(Symptom.REJECTED, "InternalError", "kDLFloat"),
    workaround="A pass that makes them `logical_or` and `logical_and`.",
    passes=(_to_logic,),
)

ONE_PIXEL = Defect(
    name="resize_to_one_pixel",
    title="Interpolation to one row or column with align_corners is rejected",
    location="tvm.topi.image.resize.get_inx",
    description="Its step is the number of pixels divided by that of the result, each less one.",
    function=lambda x: torch.nn.functional.interpolate(x, size=(1, 3), mode="bilinear", align_corners=True),
    args=normal((1, 2, 7, 9)),
    raw=RawOutcome(Symptom.REJECTED, "InternalError", "Divide by zero"),
    workaround="A legalization in `harness.compiler.schedules.common.resizing`: the first of two rows or columns.",
)


def lost_nan(name: str, function: Callable[..., Any], wrong: str, *args: Sequence[Any], operator: str = "") -> Defect:
    """Returns the defect of an operator whose NaN becomes a number.

    Args:
        name: The operator, in the defect's name.
        function: Calls the operator.
        wrong: The result of unmodified TVM, as text.
        args: The function's arguments; by default [[NaN, −1, 2]].
        operator: The operator's usual name, if it is another one.
    """
    return Defect(
        name=f"{name}_nan",
        title=f"{operator or name} turns NaN into a number",
        location="code generation of tirx.Max and tirx.Min",
        description=(
            "A maximum is compiled to `a > b ? a : b`, which is b where one of the two is NaN, and on GPUs to an "
            "instruction that returns the number. PyTorch's result is NaN."
        ),
        function=function,
        args=tuple(torch.tensor(values) for values in args or ([[math.nan, -1.0, 2.0]],)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong=wrong),
        workaround=(
            "`harness.compiler.schedules.common.nan`: in what TVM's legalization makes, both pipelines replace maxima "
            "and minima by comparisons that let NaN through; reductions compare integers (`common.ordering`)."
        ),
    )


def _lost_index(name: str, function: Callable[..., Any]) -> Defect:
    return replace(
        lost_nan(name, function, "the place of a number instead of 0"),
        title=f"{name} overlooks NaN",
        location=f"tvm.topi.{name}",
        description=(
            "A comparison with NaN is false: the index is that of a number. PyTorch's is that of the first NaN."
        ),
        workaround=(
            "A pass in `harness.compiler.schedules.common.ordering`, in both pipelines, compares integers instead."
        ),
    )


_UNSORTED = (3.0, math.nan, 1.0, math.nan, -2.0, 5.0)


def lost_order(name: str, function: Callable[..., Any], wrong: str, row: Sequence[float] = _UNSORTED) -> Defect:
    """Returns the defect of an operator that sorts a row with NaN; the arguments are those of `lost_nan`."""
    return replace(
        lost_nan(name, function, wrong, [row]),
        title=f"{name} loses its order where there is NaN",
        location=f"tvm.topi.{name}",
        description=(
            "Numbers are compared by `<`, which is false for NaN, so that even those beside it are in any order. "
            "PyTorch takes NaN for the largest number."
        ),
        workaround=(
            "A pass in `harness.compiler.schedules.common.ordering`, in both pipelines, sorts integers instead."
        ),
    )


_PAIRS = ([math.nan, 1.0], [1.0, math.nan])

LOST_NAN = (
    lost_nan("relu", lambda x: torch.relu(x), "0 instead of NaN"),
    lost_nan("elu", lambda x: torch.nn.functional.elu(x), "0 instead of NaN"),
    lost_nan("maximum", lambda x, y: torch.maximum(x, y), "1 instead of NaN, once", *_PAIRS),
    lost_nan("minimum", lambda x, y: torch.minimum(x, y), "1 instead of NaN, once", *_PAIRS),
    lost_nan(
        "max_pool",
        lambda x: torch.nn.functional.max_pool2d(x, (1, 2)),
        "1 instead of NaN, once",
        [[[[math.nan, 1.0, 1.0, math.nan]]]],
        operator="max_pool2d",
    ),
    replace(
        lost_nan("max", lambda x: x.max(), "the least finite number instead of -inf", [-math.inf, -math.inf]),
        name="max_infinity",
        title="A maximum of nothing but -inf is the least finite number",
        location="tvm::min_value, which reductions and the padding of pooling begin with",
        description="Minima and max pooling, which pads with that number, are wrong alike. PyTorch's result is -inf.",
        workaround=(
            "A pass in `harness.compiler.schedules.common.ordering`, in both pipelines, compares integers instead."
        ),
    ),
    _lost_index("argmax", lambda x: x.argmax(-1)),
    _lost_index("argmin", lambda x: x.argmin(-1)),
    lost_order("sort", lambda x: torch.sort(x, descending=True), "NaN between the numbers"),
    lost_order("argsort", lambda x: torch.argsort(x), "places of another order"),
    lost_order("topk", lambda x: torch.topk(x, 2), "NaN and 3 instead of NaN twice"),
)
"""Operators that lose NaN or infinities on the way through either frontend."""
