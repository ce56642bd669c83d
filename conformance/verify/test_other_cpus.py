"""Cheap components, compiled for processors with narrower vectors than this one: other machines' code, run here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from conformance.support.cpus import narrower
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.settings import Settings
from harness.processes import Template
from harness.runtime.cpu import architecture, cpu_features
from harness.targets.llvm import MCPU_VARIABLE
from harness.verify.runner import libraries_loaded, verify_case


@pytest.fixture(scope="module", params=narrower())
def compiling_process(request: pytest.FixtureRequest) -> Iterator[Template]:
    """What the processes are forked off that compile for the other processor."""
    with pytest.MonkeyPatch.context() as patch, closing(libraries_loaded()) as template:
        patch.setenv(MCPU_VARIABLE, request.param)
        yield template


@pytest.mark.parametrize("component", ["box_head", "scoring_head", "geometry_encoder"])
def test_component(component: str, compiling_process: Template) -> None:
    case = Case(component, DEFAULT_STRATEGY, "llvm", Scale.SHALLOW)
    result = verify_case(case, Settings(), template=compiling_process)
    assert result.expected, f"{result.problem}\n{result.outcome.error}"


@pytest.mark.skipif(
    architecture() != "x86_64" or "avx2" not in (cpu_features() or ()), reason="this processor does not execute AVX2"
)
@pytest.mark.parametrize(("own", "others"), [("x86-64-v4", ("haswell",)), ("x86-64-v3", ()), ("x86-64", ())])
def test_only_narrower_vectors_are_tried_besides(
    own: str, others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MCPU_VARIABLE, own)
    assert narrower() == others
