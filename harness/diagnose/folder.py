"""The folder of a reproduction: there as a whole, after its script has shown the fault by itself, or not at all."""

from __future__ import annotations

from pathlib import Path

from harness.core.errors import HarnessError
from harness.diagnose.diagnosis import Diagnosis
from harness.files import make_folder, replace_folder, write_files

ADVICE = "choose another folder with --reproduce"
"""Advice for the user where the folder cannot be written."""


def check_folder(folder: Path, cases: int) -> None:
    """Makes sure, before the work, that a reproduction can be written.

    Raises:
        HarnessError: Something is there already, it cannot be written, or there is not exactly one case.
    """
    if cases != 1:
        raise HarnessError(f"--reproduce takes one case, and {cases} were asked for: name one with --component")
    if folder.exists():
        raise HarnessError(f"{folder} exists: {ADVICE}")
    make_folder(folder.resolve().parent, advice=ADVICE)


def write_folder(diagnosis: Diagnosis, folder: Path) -> str:
    """Writes the folder of a reproduction, if there is one, and says what became of it.

    Raises:
        HarnessError: It cannot be written.
    """
    made = diagnosis.reproduction
    if made is None:
        return "Nothing to reproduce: no kernel diverges by itself."
    if not made.files:
        return f"No reproduction was written: {made.told}."
    with replace_folder(folder, lambda there: False, "a reproduction") as filling:
        write_files(filling, made.files, advice=ADVICE)
    return f"Reproduction: {folder}: {made.told}."
