"""Imitates other machines by the files in which Linux describes them, as in `fixtures/machines/`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

MACHINES = Path(__file__).resolve().parents[2] / "fixtures" / "machines"


def described(name: str) -> Mapping[str, str]:
    """Returns the texts of the files, by their paths without the first slash."""
    files: dict[str, str] = tomllib.loads((MACHINES / f"{name}.toml").read_text(encoding="utf-8"))["files"]
    return files


def file_system(root: Path, files: Mapping[str, str]) -> Path:
    """Writes files below a folder, which stands for the root of a machine."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root
