"""Every case of the matrix, from export to judgement, held to what `fixtures/expectations.toml` expects."""

from __future__ import annotations

import pytest

from harness.case import Case
from harness.outcome import Status
from harness.report import repro_command
from harness.verification import verify_case


def test_component(case: Case, request: pytest.FixtureRequest) -> None:
    result = verify_case(case)
    if result.outcome.status is Status.UNAVAILABLE:
        if case.target in request.config.getoption("require_target"):
            pytest.fail(f"--require-target {case.target}: {result.problem}")
        pytest.skip(result.problem)
    assert result.expected, f"{result.problem}\n{result.outcome.error}\nRun it alone: {repro_command(case)}"
