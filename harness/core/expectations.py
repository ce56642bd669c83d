"""Reads the expectations: every case whose expected outcome is not a strict pass, as data, enforced on both sides.

The file is TOML, a list of `[[expect]]` tables. Each table names cases and the failure that they must end with, or
allows the oracle to judge:

    [[expect]]
    component = ["vit", "vision_backbone"]   # one name, a list of names, or "*"; strategy, target and scale likewise
    precision = "*"                          # likewise; fp32 where it is not given
    frontend = "*"                           # likewise; torch where it is not given
    weights = "*"                            # likewise; seeded where it is not given
    strategy = "none"
    target = "*"
    scale = "*"
    status = "failed"                        # a Status other than passed and unavailable
    stage = "import"                         # the stage in which it must stop
    error = "NotImplementedError"            # type of the exception; required for status failed outside of judge
    message = "complex64 is not handled"     # regular expression, searched in the message; required likewise
    why = "the importer knows no complex dtype"

    [[expect]]
    component = "vit"
    strategy = "real"
    target = "llvm"
    scale = "full"
    judge = "oracle"                         # instead of status, stage, error and message
    outputs = ["features"]                   # optional: only these; for stage "judge": exactly these must fail
    varies = true                            # optional, with judge: on some processors it is strict, as expected
    why = "PyTorch itself is outside the strict gate against float64"

A case that no entry names must pass: strictly in fp32, by the oracle in half precision. With the weights `outliers` the
oracle may also judge where PyTorch itself leaves the strict gate. Two entries that can name the same case are an error.
This module needs neither torch nor tvm.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from harness.core.case import DEFAULT_FRONTEND, Weights
from harness.core.errors import HarnessError
from harness.core.outcome import Outcome, Stage, Status, VerdictKind
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.runtime.decoding import convert

if TYPE_CHECKING:
    from harness.core.case import Case

_FIELDS = ("component", "strategy", "target", "scale", "precision", "frontend", "weights")
ANY = "*"
"""Matches every name."""
_STRICT = "strict"

_Text = Annotated[str, Meta(pattern=r"\S")]
_Names = Annotated[tuple[_Text, ...], Meta(min_length=1)]


class Expectation(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file: the cases that it names, their expected outcome, and the reason.

    Attributes:
        component, strategy, target, scale, precision, frontend, weights: The names that the entry matches; `("*",)`
            matches all.
        why: The reason, shown in the report as the cause of a known discrepancy.
        status: The expected status; `passed` for an entry that allows the oracle verdict.
        stage: The expected last stage; None for an entry that allows the oracle verdict.
        error: Type name of the expected exception; None for any.
        message: Regular expression that must match somewhere in the message; None for any message.
        outputs: The outputs that the entry concerns; empty for all.
        varies: Whether a strict pass is expected as well, because processors round differently.
        where: File and line of the entry, for messages.
        judge: `oracle` for an entry that allows the oracle verdict.
    """

    component: _Names
    strategy: _Names
    target: _Names
    scale: _Names
    why: _Text
    status: Status = Status.PASSED
    stage: Stage | None = None
    error: _Text | None = None
    message: _Text | None = None
    outputs: _Names = ()
    varies: bool = False
    where: str = ""
    precision: _Names = (DEFAULT_PRECISION,)
    frontend: _Names = (DEFAULT_FRONTEND,)
    weights: _Names = (Weights.SEEDED.value,)
    judge: Literal["oracle"] | None = None

    def matches(self, case: Case) -> bool:
        """Returns whether the entry names this case."""
        return all(ANY in getattr(self, field) or getattr(case, field) in getattr(self, field) for field in _FIELDS)

    def allows_oracle(self, output: str) -> bool:
        """Returns whether this output may pass on the oracle verdict instead of the strict gate."""
        return self.status is Status.PASSED and (not self.outputs or output in self.outputs)


@dataclass(frozen=True)
class Check:
    """An outcome rated by its expectation.

    Attributes:
        expected: Whether the outcome was expected; None if the case was skipped as unavailable.
        sentence: Why the outcome is not expected, or why the case was skipped.
    """

    expected: bool | None
    sentence: str = ""


def load_expectations(
    path: Path, registered_names: Mapping[str, Collection[str]] | None = None
) -> tuple[Expectation, ...]:
    """Reads and validates the file of expectations.

    Args:
        path: The TOML file.
        registered_names: Known names by field (`component`, `strategy`, `target`, `scale`, `precision`, `frontend`,
            `weights`); other names are refused. None skips this check.

    Raises:
        HarnessError: The file cannot be read, is not TOML, or an entry is wrong or ambiguous; the error names file and
            line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"cannot read the expectations {path}: {error}; restore the file") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HarnessError(f"{path} is not valid TOML: {error}; correct it there") from error
    unknown = sorted(set(data) - {"expect"})
    entries = data.get("expect", [])
    if unknown or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        problem = f"unknown key {unknown[0]!r}" if unknown else "`expect` is not a list of tables"
        raise HarnessError(f"{path}: {problem}; write every entry as an [[expect]] table")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*expect\s*\]\]", line)]
    expectations: list[Expectation] = []
    for index, entry in enumerate(entries):
        line = f"line {lines[index]}" if len(lines) == len(entries) else f"entry {index + 1}"
        expectation = _parse(entry, f"{path}, {line}", registered_names or {})
        for earlier in expectations:
            if _overlap(expectation, earlier):
                raise HarnessError(
                    f"{expectation.where}: names a case that {earlier.where} names too; make them disjoint"
                )
        expectations.append(expectation)
    return tuple(expectations)


def expectation_for(case: Case, expectations: Collection[Expectation]) -> Expectation | None:
    """Returns the entry that names the case; None if there is none, so that a strict pass is expected."""
    return next((expectation for expectation in expectations if expectation.matches(case)), None)


def check(case: Case, outcome: Outcome, expectation: Expectation | None) -> Check:
    """Rates an outcome by its expectation; unexpected failures and unexpected passes are both unexpected.

    The status `unavailable` is skipped, because this machine cannot tell.
    """
    if expectation is not None and not expectation.matches(case):
        raise ValueError(f"the expectation of {expectation.where} is not about {case.id}")
    if outcome.status is Status.UNAVAILABLE:
        return Check(None, outcome.error.message if outcome.error else "not available on this machine")
    if expectation is None or expectation.status is Status.PASSED:
        problem = _pass_problem(outcome, expectation, _required_quality(case))
    else:
        problem = _failure_problem(outcome, expectation)
    return Check(not problem, problem)


def _required_quality(case: Case) -> str:
    """Returns the required quality of outputs in words."""
    if PRECISIONS[case.precision].judged_by_oracle:
        return "right by the oracle"
    if case.ill_conditioned:
        return "strict, or right by the oracle where PyTorch itself leaves the strict gate"
    return _STRICT


def _pass_problem(outcome: Outcome, expectation: Expectation | None, quality: str) -> str:
    """Returns why the outcome is not the required pass; empty if it is."""
    if outcome.status is not Status.PASSED:
        return f"expected to pass, but {_description(outcome)}"
    if not outcome.verdicts:
        return "passed without a single judged output"
    for verdict in outcome.verdicts:
        allowed = quality != _STRICT or (expectation is not None and expectation.allows_oracle(verdict.name))
        if verdict.kind is not VerdictKind.STRICT and not (verdict.kind is VerdictKind.ORACLE and allowed):
            return f"expected every output to be {quality}, but {verdict.name} is {verdict.kind}: {verdict.reason}"
    if expectation is None:
        return ""
    names = {verdict.name for verdict in outcome.verdicts}
    unknown = [name for name in expectation.outputs if name not in names]
    if unknown:
        return f"{expectation.where} names the output {unknown[0]!r}, which the case does not have"
    if not expectation.varies and not any(verdict.kind is VerdictKind.ORACLE for verdict in outcome.verdicts):
        return f"unexpected pass: strict without the oracle verdict that {expectation.where} allows; remove that entry"
    return ""


def _failure_problem(outcome: Outcome, expectation: Expectation) -> str:
    """Returns why the outcome is not the expected failure; empty if it is."""
    failure = f"{expectation.status} at {expectation.stage} as {expectation.where} says"
    if outcome.status is Status.PASSED:
        return f"unexpected pass: expected {failure}; if the cause is gone, remove that entry"
    if outcome.status is not expectation.status or outcome.stage is not expectation.stage:
        return f"expected {failure}, but {_description(outcome)}"
    error_type = outcome.error.type if outcome.error else ""
    if expectation.error is not None and error_type != expectation.error:
        failure = f"{expectation.error} at {expectation.stage} as {expectation.where} says"
        return f"expected {failure}, but {_description(outcome)}"
    message = outcome.error.message if outcome.error else ""
    if expectation.message is not None and not re.search(expectation.message, message):
        return (
            f"expected a message that matches {expectation.message!r} as {expectation.where} says, "
            f"but {_description(outcome)}"
        )
    if expectation.outputs:
        failed = {verdict.name for verdict in outcome.verdicts if verdict.kind is not VerdictKind.STRICT}
        mismatched = sorted(failed.symmetric_difference(expectation.outputs))
        if mismatched:
            return f"{expectation.where} names {sorted(expectation.outputs)} as what fails, but not so for {mismatched}"
    return ""


def _description(outcome: Outcome) -> str:
    text = f"{outcome.status.replace('_', ' ')} at {outcome.stage}"
    if outcome.error is None:
        return text
    message = outcome.error.message.strip().splitlines()
    return f"{text} with {outcome.error.type}" + (f": {message[0]}" if message else "")


def _overlap(a: Expectation, b: Expectation) -> bool:
    """Returns whether two entries name a common case."""

    def intersect(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
        return ANY in first or ANY in second or bool(set(first) & set(second))

    return all(intersect(getattr(a, field), getattr(b, field)) for field in _FIELDS)


def _parse(entry: Mapping[str, Any], where: str, registered_names: Mapping[str, Collection[str]]) -> Expectation:
    names = {key: [value] for key, value in entry.items() if key in (*_FIELDS, "outputs") and isinstance(value, str)}
    try:
        expectation = convert({**entry, **names, "where": where}, Expectation)
    except ValueError as error:
        raise HarnessError(f"{where}: {error}; correct it there") from error
    for field in _FIELDS:
        for value in getattr(expectation, field):
            if field in registered_names and value != ANY and value not in registered_names[field]:
                choices = ", ".join(sorted(registered_names[field]))
                raise HarnessError(f"{where}: there is no {field} {value!r}; choose from {choices}")
    if problem := _contradiction(expectation):
        raise HarnessError(f"{where}: {problem}")
    return expectation


def _contradiction(entry: Expectation) -> str:
    """Returns which fields of an entry exclude or need each other; empty if none do."""
    if entry.judge:
        fields = ("status", "stage", "error", "message")
        mixed = [name for name in fields if getattr(entry, name) not in (None, Status.PASSED)]
        return f"`judge` and {mixed[0]!r} exclude each other; keep one of them" if mixed else ""
    if entry.status in (Status.PASSED, Status.UNAVAILABLE):
        failures = ", ".join(status for status in Status if status not in (Status.PASSED, Status.UNAVAILABLE))
        return f'`status` is {str(entry.status)!r}; choose from {failures}, or write judge = "oracle"'
    if entry.stage is None:
        return f"`stage` is missing; choose from {', '.join(Stage)}"
    if entry.varies:
        return '`varies` needs judge = "oracle"; remove it'
    if entry.status is Status.FAILED and entry.stage is not Stage.JUDGE and None in (entry.error, entry.message):
        return "a failure needs `error` and `message`; say which exception is expected"
    if entry.outputs and entry.stage is not Stage.JUDGE:
        return '`outputs` needs stage = "judge" or judge = "oracle"; remove it'
    try:
        re.compile(entry.message or "")
    except re.error as error:
        return f"`message` is not a regular expression ({error}); correct it"
    return ""
