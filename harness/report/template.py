"""Markdown from a template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def rendered(template: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Renders a template of jinja; blank lines that follow each other become one.

    Args:
        template: The file; templates that it includes lie beside it.
        filters: What it calls to write a value.
        **values: What it knows.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the output is Markdown; every value that lands in a table goes through `cell`
    )
    environment.filters |= filters
    page = environment.get_template(template.name).render(values)
    return re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n"
