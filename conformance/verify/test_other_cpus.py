"""Cheap components, compiled for processors with narrower vectors than this one: other machines' code, run here."""

from __future__ import annotations

import pytest

from conformance.support.cpus import narrower
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.processes.call import Template
from harness.core.processors import Processors
from harness.core.settings import Settings
from harness.runtime.cpu import architecture, cpu_features
from harness.verify.runner import verify_case


@pytest.mark.parametrize("cpu", narrower())
@pytest.mark.parametrize(
    "component", ["box_head", "scoring_head", pytest.param("geometry_encoder", marks=pytest.mark.wide)]
)
def test_component(component: str, cpu: str, verifying_process: Template) -> None:
    case = Case(component, DEFAULT_STRATEGY, "llvm", Scale.SHALLOW)
    result = verify_case(case, Settings(processors=Processors(cpu)), template=verifying_process)
    assert result.expected, f"{result.problem}\n{result.outcome.error}"


@pytest.mark.skipif(
    architecture() != "x86_64" or "avx2" not in (cpu_features() or ()), reason="this processor does not execute AVX2"
)
@pytest.mark.parametrize(("own", "others"), [("x86-64-v4", ("haswell",)), ("x86-64-v3", ()), ("x86-64", ())])
def test_only_narrower_vectors_are_tried_besides(own: str, others: tuple[str, ...]) -> None:
    assert narrower(Processors(own)) == others
