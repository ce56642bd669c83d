"""Verifying a whole model in a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.compiler.targets import HOST
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.outcome import Status
from harness.core.processes import Template
from harness.core.settings import SEEDED, Settings
from harness.verify.report import Result, repro_command
from harness.verify.runner import verify_case


def verified(case: Case, settings: Settings, process: Template, request: pytest.FixtureRequest) -> Result:
    """Verifies a case; the test is skipped where nothing can run it, and fails where it is not as expected.

    The case that the tests' compiled model is of judges that folder.
    """
    if case == Case(case.component, DEFAULT_STRATEGY, HOST.name) and settings == SEEDED:
        settings = replace(settings, model=request.getfixturevalue("shallow_artifact"))
    result = verify_case(case, settings, template=process)
    if result.outcome.status is Status.UNAVAILABLE:
        if case.target in request.config.getoption("require_target"):
            pytest.fail(f"--require-target {case.target}: {result.problem}")
        pytest.skip(result.problem)
    flags = () if settings.remote is None else settings.remote.flags
    again = repro_command(case, flags)
    assert result.expected, f"{result.problem}\n{result.outcome.error}\nRun it alone: {again}"
    return result
