"""Renders pages from jinja templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2

Filters = Mapping[str, Callable[..., Any]]
"""Functions by name that a template calls to format a value."""


def rendered(template: Path, filters: Filters, **values: Any) -> str:
    """Renders Markdown from a jinja template; consecutive blank lines become one.

    Args:
        template: File of the template; templates that it includes are in the same folder.
        filters: Functions that the template calls to format values; every value in a table goes through `cell`.
        **values: Variables of the template.
    """
    page = _environment(template, filters, escaped=False).get_template(template.name).render(values)
    return re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n"


def rendered_html(template: Path, filters: Filters, **values: Any) -> str:
    """Renders HTML from a jinja template; every value is escaped.

    Args:
        template: File of the template; templates that it includes are in the same folder.
        filters: Functions that the template calls to format values.
        **values: Variables of the template.
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
