"""Pages from templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

Filters = Mapping[str, Callable[..., Any]]
"""Functions that a template calls to write a value, by name."""


def rendered(template: Path, filters: Filters, **values: Any) -> str:
    """Renders Markdown from a template of jinja; blank lines that follow each other become one.

    Args:
        template: The file; templates that it includes lie beside it.
        filters: What it calls to write a value; every value that lands in a table goes through `cell`.
        **values: What it knows.
    """
    page = _environment(template, filters, escaped=False).get_template(template.name).render(values)
    return re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n"


def rendered_html(template: Path, filters: Filters, **values: Any) -> str:
    """Renders HTML from a template of jinja; every value is text, whatever it has in it.

    Args:
        template: The file; templates that it includes lie beside it.
        filters: What it calls to write a value.
        **values: What it knows.
    """
    return _environment(template, filters, escaped=True).get_template(template.name).render(values)


def _environment(template: Path, filters: Filters, escaped: bool) -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=escaped,
    )
    environment.filters |= filters
    return environment
