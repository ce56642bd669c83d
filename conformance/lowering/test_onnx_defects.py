"""Every ONNX defect in the list is there without its workaround, as described, and with it the result is PyTorch's.

What is unmodified is expected to fail, strictly: a release that repairs a defect fails its test, and the workaround can
go.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("onnxscript", reason="the frontend onnx is not installed")

from harness.lowering.frontends.onnx import import_module
from harness.lowering.frontends.onnx.defect import OnnxDefect
from harness.lowering.frontends.onnx.defects import DEFECTS
from harness.lowering.frontends.onnx.defects_page import PAGE, render
from harness.lowering.frontends.onnx.running import import_raw, run_raw
from harness.lowering.frontends.torch_export.defect import Symptom
from harness.lowering.frontends.torch_export.running import Arrays, run_module, run_torch


class Predicted(Exception):
    """What is unmodified failed in the way that the defect describes."""


def _named(*symptoms: Symptom) -> list[object]:
    return [pytest.param(defect, id=defect.name) for defect in DEFECTS if defect.raw.symptom in symptoms]


def _is_same(actual: Arrays, expected: Arrays) -> bool:
    return len(actual) == len(expected) and all(
        a.shape == e.shape and a.dtype == e.dtype and np.allclose(a, e, rtol=1e-5, atol=1e-5, equal_nan=True)
        for a, e in zip(actual, expected, strict=True)
    )


@pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect that is worked around")
@pytest.mark.parametrize("defect", _named(Symptom.REJECTED))
def test_unmodified_accepts(defect: OnnxDefect) -> None:
    module, args = defect.reproduction()
    try:
        actual = run_raw(module, args)
    except Exception as error:
        if type(error).__name__ == defect.raw.error and re.search(defect.raw.message, str(error)):
            raise Predicted(defect.name) from error
        raise
    assert _is_same(actual, run_torch(module, args))


@pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect that is worked around")
@pytest.mark.parametrize("defect", _named(Symptom.WRONG_RESULT))
def test_unmodified_is_right(defect: OnnxDefect) -> None:
    module, args = defect.reproduction()
    if not _is_same(run_raw(module, args), run_torch(module, args)):
        raise Predicted(defect.name)


@pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect that is worked around")
@pytest.mark.parametrize("defect", _named(Symptom.SLOW))
def test_unmodified_is_optimizable(defect: OnnxDefect) -> None:
    if defect.raw.absent not in import_raw(*defect.reproduction()).script():
        raise Predicted(defect.raw.absent)


@pytest.mark.parametrize("defect", _named(*Symptom))
def test_workaround_is_right(defect: OnnxDefect) -> None:
    module, args = defect.reproduction()
    imported, parameters = import_module(module, args)
    assert defect.raw.absent in imported.script()
    actual = run_module(imported, [*(arg.numpy() for arg in args), *parameters.values()])
    assert _is_same(actual, run_torch(module, args))


def test_names_are_unique() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(names) == len(set(names))


def test_no_two_workarounds_convert_the_same_operator() -> None:
    converted = [operator for defect in DEFECTS for operator in (*defect.converters, *defect.translations)]
    assert len(converted) == len(set(converted))


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `python -m harness.lowering.frontends.onnx.defects_page`"
