"""The pages on defects, rendered from the registries."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.lowering.frontends.defect import Defect, Symptom

if TYPE_CHECKING:
    import torch

_LARGEST_SHOWN = 12
"""Elements of a tensor up to which a page has its values."""


def render_page(introduction: str, how_to: str, defects: Sequence[Defect], unmodified: str) -> str:
    """Renders the page on a frontend's defects.

    Args:
        introduction: What comes before the table, in Markdown.
        how_to: How a reproduction is run, in Markdown.
        defects: The defects, in the order of the page.
        unmodified: What the frontend without workarounds is called.
    """
    rows = [f"| [{defect.title}](#{defect.name}) | {defect.raw.symptom} | `{defect.where}` |" for defect in defects]
    table = "\n".join(["| defect | symptom | where |", "| --- | --- | --- |", *rows])
    return "\n".join([introduction, table, "", how_to, *(_section(defect, unmodified) for defect in defects)])


def _section(defect: Defect, unmodified: str) -> str:
    module, args = defect.reproduction()
    forward = type(module).forward
    names = list(inspect.signature(forward).parameters)[1:]
    inputs = "\n".join(f"{name} = {_text(value)}" for name, value in zip(names, args, strict=True))
    reproduction = textwrap.indent(f"{inputs}\n\n{textwrap.dedent(inspect.getsource(forward))}", "    ")
    return f"""## {defect.name}

{defect.title}.

{defect.what}

{reproduction}
- {unmodified}: {_raw(defect)}
- Here: {defect.workaround}
"""


def _text(value: torch.Tensor) -> str:
    if value.numel() == 0:
        return f"torch.zeros({list(value.shape)})"
    if value.numel() <= _LARGEST_SHOWN:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return f"torch.randn({list(value.shape)})" if value.dtype.is_floating_point else f"…  # {list(value.shape)}"


def _raw(defect: Defect) -> str:
    raw = defect.raw
    if raw.symptom is Symptom.REJECTED:
        return f"`{raw.error}`, with a message that matches `{raw.message}`."
    return f"{raw.wrong}."
