"""Every defect in the list is there in unmodified TVM, as described, and its workaround gives PyTorch's result.

Unmodified TVM is expected to fail, strictly: a release that repairs a defect fails its test, and the workaround can go.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from harness.lowering.frontends.torch_export import export_program, import_program
from harness.lowering.frontends.torch_export.defect import Defect, Symptom
from harness.lowering.frontends.torch_export.defects import DEFECTS
from harness.lowering.frontends.torch_export.defects_page import PAGE, render
from harness.lowering.frontends.torch_export.running import Arrays, import_raw, run_raw, run_torch, run_tvm


class Predicted(Exception):
    """Unmodified TVM failed in the way that the defect describes."""


def _named(defects: tuple[Defect, ...], *symptoms: Symptom) -> list[object]:
    return [pytest.param(defect, id=defect.name) for defect in defects if defect.raw.symptom in symptoms]


def _is_same(actual: Arrays, expected: Arrays) -> bool:
    return len(actual) == len(expected) and all(
        a.shape == e.shape and a.dtype == e.dtype and np.allclose(a, e, rtol=1e-5, atol=1e-5, equal_nan=True)
        for a, e in zip(actual, expected, strict=True)
    )


@pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect of TVM that is worked around")
@pytest.mark.parametrize("defect", _named(DEFECTS, Symptom.REJECTED))
def test_raw_tvm_accepts(defect: Defect) -> None:
    module, args = defect.reproduction()
    expected = run_torch(module, args)
    try:
        actual = run_raw(module, args)
    except Exception as error:
        if type(error).__name__ == defect.raw.error and re.search(defect.raw.message, str(error)):
            raise Predicted(defect.name) from error
        raise
    assert _is_same(actual, expected)


@pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect of TVM that is worked around")
@pytest.mark.parametrize("defect", _named(DEFECTS, Symptom.WRONG_RESULT))
def test_raw_tvm_is_right(defect: Defect) -> None:
    module, args = defect.reproduction()
    if not _is_same(run_raw(module, args), run_torch(module, args)):
        raise Predicted(defect.name)


@pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect of TVM that is worked around")
@pytest.mark.parametrize("defect", _named(DEFECTS, Symptom.SLOW))
def test_raw_tvm_is_optimizable(defect: Defect) -> None:
    if defect.raw.absent not in import_raw(*defect.reproduction()).script():
        raise Predicted(defect.raw.absent)


@pytest.mark.parametrize("defect", _named(DEFECTS, Symptom.SLOW))
def test_workaround_is_optimizable(defect: Defect) -> None:
    module, _ = import_program(export_program(*defect.reproduction()))
    assert defect.raw.absent in module.script()


@pytest.mark.parametrize("defect", _named(DEFECTS, *Symptom))
def test_workaround_is_right(defect: Defect) -> None:
    module, args = defect.reproduction()
    for actual, expected in zip(run_tvm(module, args), run_torch(module, args), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_names_are_unique() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(names) == len(set(names))


def test_no_two_workarounds_convert_the_same_operator() -> None:
    converted = [operator for defect in DEFECTS for operator in defect.converters]
    assert len(converted) == len(set(converted))


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), f"run `python -m {render.__module__}`"
