"""Writes a report: `verification_report.json`, and `VERIFICATION_REPORT.md` rendered from it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.report.verification.document import Result, build_report
from harness.report.verification.markdown import render_report

JSON_NAME = "verification_report.json"
MARKDOWN_NAME = "VERIFICATION_REPORT.md"


def write_report(
    results: Sequence[Result],
    machine: Mapping[str, Any],
    versions: Mapping[str, Any],
    directory: Path,
    *,
    flags: Sequence[str] = (),
    created: datetime | None = None,
) -> Path:
    """Writes both files into the folder, each complete or not at all, and returns the JSON's path.

    Args:
        results: In the order in which they are to appear.
        machine: From `harness.machine.describe_machine`.
        versions: From `harness.machine.versions`.
        directory: Is made if it does not exist.
        flags: Appended to every command that reproduces a case.
        created: Now, unless it is given.

    Raises:
        HarnessError: If the folder cannot be made or written.
    """
    report = build_report(results, machine, versions, flags=flags, created=created)
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    page = render_report(json.loads(text))
    write_files(directory, {JSON_NAME: text.encode(), MARKDOWN_NAME: page.encode()})
    return directory / JSON_NAME


def check_writable(directory: Path) -> None:
    """Makes the folder and tries to write into it: better to know before a long run than after it.

    Raises:
        HarnessError: If the folder cannot be made or written.
    """
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".writable.{os.getpid()}"
        probe.write_bytes(b"?")
        probe.unlink()


def write_files(directory: Path, files: Mapping[str, bytes], option: str = "--report") -> None:
    """Writes all files under temporary names, then renames them: a report is whole or not there.

    Args:
        directory: Is made if it does not exist.
        files: Contents by name; a name may have folders in it.
        option: Of the command, for the sentence.

    Raises:
        HarnessError: If the folder cannot be made or written.
    """
    temporary = {name: (directory / name).with_name(f".{Path(name).name}.{os.getpid()}.tmp") for name in files}
    try:
        with _writing(directory, option):
            for name, content in files.items():
                temporary[name].parent.mkdir(parents=True, exist_ok=True)
                temporary[name].write_bytes(content)
            for name, path in temporary.items():
                path.replace(directory / name)
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(directory: Path, option: str = "--report") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        problem = f"cannot write the report to {directory}: {reason}; choose another folder with {option}"
        raise HarnessError(problem) from error
