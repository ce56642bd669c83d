"""Reads the generated page of commands."""

from __future__ import annotations

import re
from collections.abc import Mapping

from docs.generate.figures import DOCS


def options() -> Mapping[str, set[str]]:
    """Returns the options of each command."""
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^## `sam3-tvm (\S+)`$", page, flags=re.MULTILINE)
    found = zip(sections[::2], sections[1::2], strict=True)
    return {name: set(re.findall(r"--[a-z][a-z0-9-]*(?=[`,/: ])", text)) for name, text in found}
