"""Renders the pages on defects from the registries."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.compiler.lowering.frontends.defect import Defect, Symptom

if TYPE_CHECKING:
    import torch

_MAX_ELEMENTS = 12
"""Largest number of elements of a tensor whose values a page has."""


def render_page(introduction: str, instructions: str, defects: Sequence[Defect], unmodified: str) -> str:
    """Renders the page on a frontend's defects.

    Args:
        introduction: Text before the table, in Markdown.
        instructions: Instructions to run a reproduction, in Markdown.
        defects: The defects, in the order of the page.
        unmodified: Name of the frontend without workarounds.
    """
    rows = [f"| [{defect.title}](#{defect.name}) | {defect.raw.symptom} | `{defect.location}` |" for defect in defects]
    table = "\n".join(["| defect | symptom | where |", "| --- | --- | --- |", *rows])
    return "\n".join([introduction, table, "", instructions, *(_section(defect, unmodified) for defect in defects)])


def _section(defect: Defect, unmodified: str) -> str:
    """Returns the section on a defect, with the inputs of its reproduction and the source of `forward`."""
    module, args = defect.reproduction()
    forward = type(module).forward
    names = list(inspect.signature(forward).parameters)[1:]
    inputs = "\n".join(f"{name} = {_text(value)}" for name, value in zip(names, args, strict=True))
    reproduction = textwrap.indent(f"{inputs}\n\n{textwrap.dedent(inspect.getsource(forward))}", "    ")
    return f"""## {defect.name}

{defect.title}.

{defect.description}

{reproduction}
- {unmodified}: {_raw(defect)}
- Here: {defect.workaround}
"""


def _text(value: torch.Tensor) -> str:
    if value.numel() == 0:
        return f"torch.zeros({list(value.shape)})"
    if value.numel() <= _MAX_ELEMENTS:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return f"torch.randn({list(value.shape)})" if value.dtype.is_floating_point else f"…  # {list(value.shape)}"


def _raw(defect: Defect) -> str:
    raw = defect.raw
    if raw.symptom is Symptom.REJECTED:
        return f"`{raw.error}`, with a message that matches `{raw.message}`."
    return f"{raw.wrong}."
