"""Writes the folder of a reproduction, completely or not at all, after its script has shown the fault."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import HarnessError
from harness.diagnose.diagnosis import Diagnosis
from harness.files import make_folder, replace_folder, write_files

ADVICE_ON_FOLDER = "choose another folder with --reproduce"
"""Advice for the user if the folder cannot be written."""


def check_folder(folder: Path, cases: int) -> None:
    """Checks before the work that a reproduction can be written.

    Raises:
        HarnessError: The folder exists, it cannot be written, or there is not exactly one case.
    """
    if cases != 1:
        raise HarnessError(f"--reproduce takes one case, and {cases} were asked for: name one with --component")
    if folder.exists():
        raise HarnessError(f"{folder} exists: {ADVICE_ON_FOLDER}")
    make_folder(folder.resolve().parent, advice=ADVICE_ON_FOLDER)


def write_folder(diagnosis: Diagnosis, folder: Path) -> str:
    """Writes the folder of a reproduction, if there is one, and returns a sentence on the outcome.

    Raises:
        HarnessError: The folder cannot be written.
    """
    reproduction = diagnosis.reproduction
    if reproduction is None:
        return "Nothing to reproduce: no kernel diverges by itself."
    if not reproduction.files:
        return f"No reproduction was written: {reproduction.description}."
    with replace_folder(folder, lambda existing: False, "a reproduction") as new_folder:
        write_files(new_folder, reproduction.files, advice=ADVICE_ON_FOLDER)
    return f"Reproduction: {folder}: {reproduction.description}."
