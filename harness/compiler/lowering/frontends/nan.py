"""Lists the operators whose NaN becomes a number in TVM's backend, as data for the defects of both frontends.

The pages on defects print the `forward` of a reproduction, so that each operator has a module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom

_WORKAROUND = (
    "`harness.compiler.schedules.common.nan`: in what TVM's legalization makes, both pipelines replace maxima and "
    "minima by comparisons that let NaN through; those of reductions on GPUs compare integers (`common.ordering`)."
)
_LOCATION = "code generation of tirx.Max and tirx.Min"
_NAN = math.nan


class _Relu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)


class _Elu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.elu(x)


class _Maximum(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, y)


class _Minimum(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.minimum(x, y)


class _Hardtanh(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.hardtanh(x)


class _Relu6(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu6(x)


class _Hardsigmoid(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.hardsigmoid(x)


class _MaxPool(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool2d(x, (1, 2))


class _Max(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.max()


class _Amax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(-1)


class _Amin(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.amin(-1)


class _Argmax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


class _Argmin(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmin(-1)


class _Sort(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.sort(x, descending=True)
        return values, indices


class _Argsort(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.argsort(x)


class _Topk(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, 2)
        return values, indices


class _Median(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.median(x, -1)
        return values, indices


@dataclass(frozen=True)
class LostNan:
    """An operator that loses NaN.

    Attributes:
        name: Name of the defect.
        operator: The operator's usual name.
        module: A module with the operator.
        args: The module's inputs.
        wrong: The result of unmodified TVM, as text.
    """

    name: str
    operator: str
    module: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    wrong: str

    @property
    def facts(self) -> dict[str, Any]:
        """Returns the fields of the defect, which both frontends share."""
        return {
            "name": self.name,
            "title": f"{self.operator} turns NaN into a number",
            "location": _LOCATION,
            "description": (
                "A maximum is compiled to `a > b ? a : b`, which is b where one of the two is NaN, and on GPUs to an "
                "instruction that returns the number. PyTorch's result is NaN."
            ),
            "reproduction": lambda: (self.module, self.args),
            "raw": RawOutcome(Symptom.WRONG_RESULT, wrong=self.wrong),
            "workaround": _WORKAROUND,
        }


_ROW = (torch.tensor([[_NAN, -1.0, 2.0]]),)
_ROWS = (torch.tensor([_NAN, 1.0]), torch.tensor([1.0, _NAN]))
RELU = LostNan("relu_nan", "relu", _Relu(), _ROW, "0 instead of NaN")
ELU = LostNan("elu_nan", "elu", _Elu(), _ROW, "0 instead of NaN")
MAXIMUM = LostNan("maximum_nan", "maximum", _Maximum(), _ROWS, "1 instead of NaN, once")
MINIMUM = LostNan("minimum_nan", "minimum", _Minimum(), _ROWS, "1 instead of NaN, once")
HARDTANH = LostNan("hardtanh_nan", "hardtanh", _Hardtanh(), _ROW, "1 instead of NaN")
RELU6 = LostNan("relu6_nan", "relu6", _Relu6(), _ROW, "6 instead of NaN")
HARDSIGMOID = LostNan("hardsigmoid_nan", "hardsigmoid", _Hardsigmoid(), _ROW, "1 instead of NaN")
MAX_POOL = LostNan(
    "max_pool_nan", "max_pool2d", _MaxPool(), (torch.tensor([[[[_NAN, 1.0, 1.0, _NAN]]]]),), "1 instead of NaN, once"
)
MAX = LostNan("max_nan", "max over everything", _Max(), _ROW, "2 instead of NaN")
AMAX = LostNan("amax_nan", "amax", _Amax(), _ROW, "2 instead of NaN")
AMIN = LostNan("amin_nan", "amin", _Amin(), _ROW, "-1 instead of NaN")

INFINITY = LostNan(
    "max_infinity", "max", _Max(), (torch.full((2,), -math.inf),), "the least finite number instead of -inf"
).facts | {
    "title": "A maximum of nothing but -inf is the least finite number",
    "location": "tvm::min_value, which reductions and the padding of pooling begin with",
    "description": "Minima and max pooling, which pads with that number, are wrong alike. PyTorch's result is -inf.",
    "workaround": (
        "`harness.compiler.schedules.common.nan.keep_infinities` begins with an infinity, on the CPU; on GPUs "
        "`common.ordering` compares integers."
    ),
}
"""The fields of the defect of extremes of infinities."""


def _index_facts(name: str, module: torch.nn.Module) -> dict[str, Any]:
    """Returns the fields of the defect of argmax or argmin, which has a cause and a workaround of its own."""
    lost = LostNan(f"{name}_nan", name, module, _ROW, "the place of a number instead of 0")
    return lost.facts | {
        "title": f"{name} overlooks NaN",
        "location": f"tvm.topi.{name}",
        "description": (
            "A comparison with NaN is false: the index is that of a number. PyTorch's is that of the first NaN."
        ),
        "workaround": (
            "A legalization in `harness.compiler.schedules.common.nan`, on the CPU; on GPUs `common.ordering` compares "
            "integers."
        ),
    }


INDICES = (_index_facts("argmax", _Argmax()), _index_facts("argmin", _Argmin()))
"""The fields of the defects of argmax and argmin."""


def sort_facts(name: str, module: torch.nn.Module, row: Sequence[float], wrong: str) -> dict[str, Any]:
    """Returns the fields of the defect of an operator that sorts a row."""
    return LostNan(f"{name}_nan", name, module, (torch.tensor([row]),), wrong).facts | {
        "title": f"{name} loses its order where there is NaN",
        "location": f"tvm.topi.{name}",
        "description": (
            "Numbers are compared by `<`, which is false for NaN, so that even those beside it are in any order. "
            "PyTorch takes NaN for the largest number."
        ),
        "workaround": (
            "A pass in `harness.compiler.schedules.common.ordering`, in both pipelines, sorts integers instead."
        ),
    }


_UNSORTED = (3.0, _NAN, 1.0, _NAN, -2.0, 5.0)
SORTS = (
    sort_facts("sort", _Sort(), _UNSORTED, "NaN between the numbers"),
    sort_facts("argsort", _Argsort(), _UNSORTED, "places of another order"),
    sort_facts("topk", _Topk(), _UNSORTED, "NaN and 3 instead of NaN twice"),
)
MEDIAN = sort_facts("median", _Median(), (_NAN, 2.0, 1.0), "1 instead of NaN")
