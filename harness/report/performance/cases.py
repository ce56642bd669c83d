"""The case of a benchmark, as the suites write it: as its fields, and before that as its id.

This is the only place that knows how the cases of older files were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Case, Scale
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.core.weights import Weights

HOST_TARGET = "llvm"
"""The target that whole models are measured on."""
_FORMER_WHOLE_MODEL = "end_to_end"
"""The whole model of files that name a question and a scale, but no case."""


def recorded_case(info: Mapping[str, Any]) -> Case | None:
    """Reads the case of a benchmark from its `extra_info`.

    Args:
        info: The case is in `case`; older files have its id there, or for a question to the whole model only `scale`.

    Returns:
        The case; None for a benchmark that is about none.

    Raises:
        ValueError: `case` is neither the fields nor the id of a case.
    """
    data = info.get("case")
    if isinstance(data, str):
        return _case_of_id(data)
    if data is not None:
        return _case_of_fields(data)
    if "what" in info:
        return Case(_FORMER_WHOLE_MODEL, DEFAULT_STRATEGY, HOST_TARGET, str(info.get("scale", "")))
    return None


def variant_of(case: Case) -> str:
    """Describes a case among others of its component: real · llvm · full, and what is not as usual."""
    return " · ".join([case.strategy, case.target, case.scale, *_unusual(case)])


def question_variant_of(case: Case) -> str:
    """Describes the case of a question to the whole model: its scale, and what is not as usual."""
    usual = (DEFAULT_STRATEGY, HOST_TARGET)
    parts = [name for name in (case.strategy, case.target) if name not in usual] + [case.scale, *_unusual(case)]
    return " · ".join(part for part in parts if part)


def precision_of(case: Case) -> str:
    """Describes precision and frontend of a case, as far as they are not the default ones."""
    return " · ".join(_lowering(case))


def _unusual(case: Case) -> list[str]:
    drawn = [case.weights] if case.weights != Weights.SEEDED else []
    return _lowering(case) + drawn + ([f"seed {case.seed}"] if case.seed else [])


def _lowering(case: Case) -> list[str]:
    found = [case.precision] if case.precision != DEFAULT_PRECISION else []
    return found + ([case.frontend] if case.frontend != DEFAULT_FRONTEND else [])


def _case_of_fields(data: object) -> Case:
    if not isinstance(data, dict):
        raise ValueError(f"{data!r} is no case")
    try:
        case = Case.from_json(data)
    except TypeError as error:
        raise ValueError(f"{data!r} is no case: {error}") from error
    texts = (case.component, case.strategy, case.target, case.scale, case.precision, case.frontend, case.weights)
    if not all(isinstance(text, str) and text for text in texts) or not isinstance(case.seed, int):
        raise ValueError(f"{data!r} is no case")
    return case


def _case_of_id(text: str) -> Case:
    """Reads `component-strategy-target-scale`, which a precision other than fp32 follows."""
    parts = text.split("-")
    precision = parts.pop() if len(parts) == 5 else DEFAULT_PRECISION
    if len(parts) != 4 or not all(parts) or parts[3] not in list(Scale) or precision not in PRECISIONS:
        raise ValueError(f"{text!r} is no id of a case")
    component, strategy, target, scale = parts
    return Case(component, strategy, target, scale, precision=precision)
