"""Renders pages from jinja templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def rendered(template: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Renders a jinja template.

    In HTML (`.html.j2`) every value is escaped. Elsewhere consecutive blank lines become one, and every value in a
    table goes through `cell`.

    Args:
        template: File of the template; templates that it includes are in the same folder.
        filters: Functions that the template calls to format values.
        **values: Variables of the template.
    """
    import jinja2

    is_html = template.name.endswith(".html.j2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=is_html,
    )
    environment.filters |= filters
    page = environment.get_template(template.name).render(values)
    return page if is_html else re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n"
