"""Provides what the tests of every frontend's defects share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from harness.compiler.lowering.frontends.defect import Defect, Symptom
from harness.compiler.lowering.frontends.running import Arrays, run_raw, run_torch

Import = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], Any]


class Predicted(Exception):
    """The unmodified frontend failed in the way that the defect describes."""


EXPECTED = pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect that is worked around")
"""Unmodified, a frontend must fail as described: a release that repairs a defect fails the test."""


def named(defects: Iterable[Defect], *symptoms: Symptom) -> list[object]:
    """Parameters of a test: the defects with one of these symptoms."""
    return [pytest.param(defect, id=defect.name) for defect in defects if defect.raw.symptom in symptoms]


def is_same(actual: Arrays, expected: Arrays) -> bool:
    return len(actual) == len(expected) and all(
        a.shape == e.shape and a.dtype == e.dtype and np.allclose(a, e, rtol=1e-5, atol=1e-5, equal_nan=True)
        for a, e in zip(actual, expected, strict=True)
    )


def hold_to_rejection(defect: Defect, import_raw: Import) -> None:
    """Raises Predicted if the unmodified frontend rejects the reproduction as the defect says."""
    module, args = defect.reproduction()
    expected = run_torch(module, args)
    try:
        actual = run_raw(import_raw, module, args)
    except Exception as error:
        if type(error).__name__ == defect.raw.error and re.search(defect.raw.message, str(error)):
            raise Predicted(defect.name) from error
        raise
    assert is_same(actual, expected)


def hold_to_wrong_result(defect: Defect, import_raw: Import) -> None:
    """Raises Predicted if the unmodified frontend gives another result than PyTorch."""
    module, args = defect.reproduction()
    if not is_same(run_raw(import_raw, module, args), run_torch(module, args)):
        raise Predicted(defect.name)


def hold_to_slowness(defect: Defect, import_raw: Import) -> None:
    """Raises Predicted if the printed module lacks what an optimized one has."""
    if defect.raw.absent not in import_raw(*defect.reproduction()).script():
        raise Predicted(defect.raw.absent)
