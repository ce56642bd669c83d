"""Verifies a whole model in a test, and asks upstream alone what a judge is held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from harness.compiler.targets import HOST
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.outcome import Status, Verdict
from harness.core.processes.call import Template
from harness.core.program import Arrays
from harness.core.settings import SEEDED, Settings
from harness.models.registry import DEFAULT_MODEL, subjects
from harness.models.sam3.scripted import Script
from harness.models.sam3.source import UpstreamModel
from harness.models.sam3.upstream import upstream
from harness.parity.references import Reference
from harness.runtime.sam3.images import load_image
from harness.verify.report import Result, repro_command
from harness.verify.runner import verify_case


def verified(
    case: Case, settings: Settings, questions: tuple[str, ...], process: Template, request: pytest.FixtureRequest
) -> Result:
    """Verifies a case by these questions, all if there are none.

    The test is skipped where nothing can run it, and fails where it is not as expected. The case that the tests'
    compiled SAM 3 is of judges that folder.
    """
    settings = replace(settings, questions=questions)
    is_default = case == Case(case.component, DEFAULT_STRATEGY, HOST.name)
    is_compiled = is_default and subjects()[case.component].model == DEFAULT_MODEL
    if is_compiled and settings == replace(SEEDED, questions=questions):
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


@dataclass(frozen=True, eq=False)
class Answer:
    """Upstream's answer to a part of a question about a photograph, and the judge of that part."""

    name: str
    size: tuple[int, int]
    reference: Reference
    judge_part: Callable[..., tuple[Verdict, ...]]

    @property
    def first(self) -> Arrays:
        return self.reference.first

    def judge(self, actual: Arrays, *, by_oracle: bool = False) -> tuple[Verdict, ...]:
        return self.judge_part(self.name, actual, self.reference, self.size, by_oracle=by_oracle)


def upstream_answers(
    script: Script[Any], case: Case, judge_part: Callable[..., tuple[Verdict, ...]], names: tuple[str, ...] = ()
) -> Iterator[Answer]:
    """Yields upstream's answers to the questions of these names, all if there are none, one after the other."""
    with upstream():
        model = UpstreamModel(case, SEEDED)
        for question in script.questions(case, SEEDED):
            if names and question.name not in names:
                continue
            reference, size = model.answer(script.upstream, question), load_image(question.image).size
            for name in question.answers:
                yield Answer(name, size, reference.part(name), judge_part)
