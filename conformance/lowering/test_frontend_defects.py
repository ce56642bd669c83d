"""Every defect in the list is there in unmodified TVM, as described, and its workaround gives PyTorch's result.

Unmodified TVM is expected to fail, strictly: a release that repairs a defect fails its test, and the workaround can go.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.support.batches import Part, run_together
from conformance.support.defects import (
    EXPECTED,
    hold_to_rejection,
    hold_to_slowness,
    hold_to_wrong_result,
    named,
)
from harness.compiler.lowering.frontends.defect import Defect, Symptom
from harness.compiler.lowering.frontends.defects_page import PAGES
from harness.compiler.lowering.frontends.running import Arrays, run_repaired, run_torch
from harness.compiler.lowering.frontends.torch_export.defects import DEFECTS
from harness.compiler.lowering.frontends.torch_export.importing import import_module, import_raw


@EXPECTED
@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.REJECTED))
def test_raw_tvm_accepts(defect: Defect) -> None:
    hold_to_rejection(defect, import_raw)


@EXPECTED
@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.WRONG_RESULT))
def test_raw_tvm_is_right(defect: Defect) -> None:
    hold_to_wrong_result(defect, import_raw)


@EXPECTED
@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.SLOW))
def test_raw_tvm_is_optimizable(defect: Defect) -> None:
    hold_to_slowness(defect, import_raw)


@pytest.mark.parametrize("defect", named(DEFECTS, Symptom.SLOW))
def test_workaround_is_optimizable(defect: Defect) -> None:
    module, _ = import_module(*defect.reproduction())
    assert defect.raw.absent in module.script()


@pytest.fixture(scope="module")
def repaired() -> dict[str, Arrays]:
    """What the reproductions of all defects return, imported with every workaround in one program."""
    parts = [Part(defect.name, *defect.reproduction()) for defect in DEFECTS]
    found = run_together(lambda *program: [*map(torch.from_numpy, run_repaired(import_module, *program))], parts)
    return {part.what: [output.numpy() for output in outputs] for part, outputs in zip(parts, found, strict=True)}


@pytest.mark.parametrize("defect", named(DEFECTS, *Symptom))
def test_workaround_is_right(defect: Defect, repaired: dict[str, Arrays]) -> None:
    for actual, expected in zip(repaired[defect.name], run_torch(*defect.reproduction()), strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_names_are_unique() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(names) == len(set(names))


def test_no_two_workarounds_convert_the_same_operator() -> None:
    converted = [operator for defect in DEFECTS for operator in defect.converters]
    assert len(converted) == len(set(converted))


def test_pages_are_up_to_date() -> None:
    for path, page in PAGES.items():
        assert path.read_text(encoding="utf-8") == page(), f"run `python -m {page.__module__}`"
