"""Every case of the matrix, from export to judgement, held to what `fixtures/expectations.toml` expects."""

from __future__ import annotations

import pytest

from harness.core.case import Case
from harness.core.outcome import Status
from harness.core.processes.call import Template
from harness.core.settings import Settings
from harness.verify.report import repro_command
from harness.verify.runner import verify_case


def test_component(
    case: Case, verification_settings: Settings, verifying_process: Template, request: pytest.FixtureRequest
) -> None:
    result = verify_case(case, verification_settings, template=verifying_process)
    if result.outcome.emulated and case.target in request.config.getoption("require_target"):
        pytest.fail(f"--require-target {case.target}: its kernels were emulated on the CPU, and no device ran them")
    if result.outcome.status is Status.UNAVAILABLE:
        if case.target in request.config.getoption("require_target"):
            pytest.fail(f"--require-target {case.target}: {result.problem}")
        pytest.skip(result.problem)
    flags = () if verification_settings.remote is None else verification_settings.remote.flags
    assert not result.outcome.lost_schedules
    assert result.expected, f"{result.problem}\n{result.outcome.error}\nRun it alone: {repro_command(case, flags)}"
