"""Every defect in the lists is there without its workaround, as described, and with it the result is PyTorch's.

What is unmodified is expected to fail, strictly: a release that repairs a defect fails its test, and the workaround can
go.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from conformance.support.batches import UNOPTIMIZED, Part, run_together
from harness.compiler.lowering.frontends.defect import Defect, Symptom
from harness.compiler.lowering.frontends.onnx import defects as onnx
from harness.compiler.lowering.frontends.onnx import importing as onnx_importing
from harness.compiler.lowering.frontends.running import Arrays, run_raw, run_repaired, run_torch
from harness.compiler.lowering.frontends.torch_export import defects as torch_export
from harness.compiler.lowering.frontends.torch_export import importing as torch_importing


@dataclass(frozen=True, eq=False)
class Frontend:
    """Its defects, and how it imports without and with their workarounds."""

    defects: tuple[Defect, ...]
    import_raw: Callable[..., Any]
    import_module: Callable[..., Any]


FRONTENDS = {
    "torch": Frontend(torch_export.DEFECTS, torch_importing.import_raw, torch_importing.import_module),
    "onnx": Frontend(onnx.DEFECTS, onnx_importing.import_raw, onnx_importing.import_module),
}


class Predicted(Exception):
    """The unmodified frontend failed in the way that the defect describes."""


EXPECTED = pytest.mark.xfail(strict=True, raises=Predicted, reason="a defect that is worked around")


def each_defect(*symptoms: Symptom) -> pytest.MarkDecorator:
    """Parametrizes a test by the defects with one of these symptoms, and their frontends."""
    parameters = [
        pytest.param(frontend, defect, id=f"{name}-{defect.name}")
        for name, frontend in FRONTENDS.items()
        for defect in frontend.defects
        if defect.raw.symptom in symptoms
    ]
    return pytest.mark.parametrize(("frontend", "defect"), parameters)


@cache
def outputs(frontend: Frontend, repaired: bool) -> dict[str, Arrays]:
    """What reproductions return, in one program: of all defects, or unmodified of those with a wrong result."""
    parts = [
        Part(defect.name, *defect.reproduction())
        for defect in frontend.defects
        if repaired or defect.raw.symptom is Symptom.WRONG_RESULT
    ]

    def run(*program: Any) -> list[torch.Tensor]:
        if not repaired:
            return [*map(torch.from_numpy, run_raw(frontend.import_raw, *program))]
        return [*map(torch.from_numpy, run_repaired(frontend.import_module, *program, UNOPTIMIZED))]

    found = run_together(run, parts)
    return {part.what: [output.numpy() for output in results] for part, results in zip(parts, found, strict=True)}


def is_same(actual: Arrays, expected: Arrays) -> bool:
    return len(actual) == len(expected) and all(
        a.shape == e.shape and a.dtype == e.dtype and np.allclose(a, e, rtol=1e-5, atol=1e-5, equal_nan=True)
        for a, e in zip(actual, expected, strict=True)
    )


@EXPECTED
@each_defect(Symptom.REJECTED)
def test_unmodified_accepts(frontend: Frontend, defect: Defect) -> None:
    module, args = defect.reproduction()
    expected = run_torch(module, args)
    try:
        actual = run_raw(frontend.import_raw, module, args)
    except Exception as error:
        if type(error).__name__ == defect.raw.error and re.search(defect.raw.message, str(error)):
            raise Predicted(defect.name) from error
        raise
    assert is_same(actual, expected)


@EXPECTED
@each_defect(Symptom.WRONG_RESULT)
def test_unmodified_is_right(frontend: Frontend, defect: Defect) -> None:
    """In the program of all, or where it is right there, alone."""
    program, expected = defect.reproduction(), run_torch(*defect.reproduction())
    together = outputs(frontend, repaired=False)[defect.name]
    if not (is_same(together, expected) and is_same(run_raw(frontend.import_raw, *program), expected)):
        raise Predicted(defect.name)


@EXPECTED
@each_defect(Symptom.SLOW)
def test_unmodified_is_optimizable(frontend: Frontend, defect: Defect) -> None:
    if defect.raw.absent not in frontend.import_raw(*defect.reproduction()).script():
        raise Predicted(defect.raw.absent)


@each_defect(Symptom.SLOW)
def test_workaround_is_optimizable(frontend: Frontend, defect: Defect) -> None:
    imported, _ = frontend.import_module(*defect.reproduction())
    assert defect.raw.absent in imported.script()


@each_defect(*Symptom)
def test_workaround_is_right(frontend: Frontend, defect: Defect) -> None:
    assert is_same(outputs(frontend, repaired=True)[defect.name], run_torch(*defect.reproduction()))


@pytest.mark.parametrize("frontend", FRONTENDS.values(), ids=FRONTENDS)
def test_names_and_workarounds_are_unique(frontend: Frontend) -> None:
    for listed in (
        [defect.name for defect in frontend.defects],
        [name for defect in frontend.defects for name in (*defect.converters, *defect.translations)],
    ):
        assert len(listed) == len(set(listed))
