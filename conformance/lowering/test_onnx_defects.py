"""Every ONNX defect in the list is there without its workaround, as described, and with it the result is PyTorch's.

What is unmodified is expected to fail, strictly: a release that repairs a defect fails its test, and the workaround can
go.
"""

from __future__ import annotations

import pytest
import torch

from conformance.support.batches import Part, run_together
from conformance.support.defects import (
    EXPECTED,
    hold_to_rejection,
    hold_to_slowness,
    hold_to_wrong_result,
    is_same,
    named,
)
from harness.compiler.lowering.frontends.defect import Defect, Symptom
from harness.compiler.lowering.frontends.onnx.defects import DEFECTS
from harness.compiler.lowering.frontends.onnx.importing import import_module, import_raw
from harness.compiler.lowering.frontends.running import Arrays, run_repaired, run_torch


@EXPECTED
@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.REJECTED))
def test_unmodified_accepts(defect: Defect) -> None:
    hold_to_rejection(defect, import_raw)


@EXPECTED
@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.WRONG_RESULT))
def test_unmodified_is_right(defect: Defect) -> None:
    hold_to_wrong_result(defect, import_raw)


@EXPECTED
@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.SLOW))
def test_unmodified_is_optimizable(defect: Defect) -> None:
    hold_to_slowness(defect, import_raw)


@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.SLOW))
def test_workaround_is_optimizable(defect: Defect) -> None:
    imported, _ = import_module(*defect.reproduction())
    assert defect.raw.absent in imported.script()


@pytest.fixture(scope="module")
def repaired() -> dict[str, Arrays]:
    """What the reproductions of all defects return, in one program."""
    parts = [Part(defect.name, *defect.reproduction()) for defect in DEFECTS]
    found = run_together(lambda *program: [*map(torch.from_numpy, run_repaired(import_module, *program))], parts)
    return {part.what: [output.numpy() for output in outputs] for part, outputs in zip(parts, found, strict=True)}


@pytest.mark.parametrize("defect", named(DEFECTS, *Symptom))
def test_workaround_is_right(defect: Defect, repaired: dict[str, Arrays]) -> None:
    assert is_same(repaired[defect.name], run_torch(*defect.reproduction()))


def test_names_are_unique() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(names) == len(set(names))


def test_no_two_workarounds_convert_the_same_operator() -> None:
    converted = [operator for defect in DEFECTS for operator in (*defect.converters, *defect.translations)]
    assert len(converted) == len(set(converted))
