"""Run as a program, writes docs/DEFECTS.md from the registry of defects."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from harness.core.settings import REPOSITORY
from harness.files import make_folder, write_text
from harness.lowering.frontends.torch_export.defect import TESTED_VERSION, Defect, Symptom
from harness.lowering.frontends.torch_export.defects import DEFECTS

PAGE = REPOSITORY / "docs" / "DEFECTS.md"

_INTRODUCTION = f"""# Defects of TVM's PyTorch frontend

Seen in apache-tvm {TESTED_VERSION}, with `torch.export` and `tvm.relax.frontend.torch.from_exported_program`. Each is
worked around in `harness/lowering/frontends/torch_export/defects/`.
`conformance/lowering/test_frontend_defects.py` runs every reproduction below:
unmodified TVM must fail as described (a release that repairs a defect fails the test, so that the workaround goes), and
with the workaround the result must be PyTorch's. `conformance/lowering/test_operators.py`
holds every operator that SAM 3's
components use to PyTorch and to float64, on the components' own shapes and around them.

This page is generated: `python -m harness.lowering.frontends.torch_export.defects_page`.
"""

_HOW_TO = """## Running a reproduction

    from harness.lowering.frontends.torch_export.defects import DEFECTS
    from harness.lowering.frontends.torch_export.running import run_raw, run_torch, run_tvm

    defect = next(defect for defect in DEFECTS if defect.name == "grid_sample_layout")
    module, args = defect.reproduction()
    run_torch(module, args), run_tvm(module, args), run_raw(module, args)
"""


def render() -> str:
    """Returns the page's text."""
    rows = [f"| [{defect.title}](#{_anchor(defect)}) | {defect.raw.symptom} | `{defect.where}` |" for defect in DEFECTS]
    table = "\n".join(["| defect | symptom | where |", "| --- | --- | --- |", *rows])
    return "\n".join([_INTRODUCTION, table, "", _HOW_TO, *(_section(defect) for defect in DEFECTS)])


def write_page(path: Path = PAGE) -> None:
    """Writes the page, whole or not at all."""
    make_folder(path.parent)
    write_text(path, render())


def _anchor(defect: Defect) -> str:
    return re.sub(r"[^\w\- ]", "", defect.name.lower()).replace(" ", "-")


def _section(defect: Defect) -> str:
    module, args = defect.reproduction()
    forward = textwrap.dedent(inspect.getsource(type(module).forward))
    inputs = "\n".join(f"{name} = {_text(value)}" for name, value in zip(_parameters(module), args, strict=True))
    reproduction = textwrap.indent(f"{inputs}\n\n{forward}", "    ")
    return f"""## {defect.name}

{defect.title}.

{defect.what}

{reproduction}
- Unmodified TVM: {_raw(defect)}
- Here: {defect.workaround}
"""


def _parameters(module: object) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]  # type: ignore[attr-defined]


def _text(value: object) -> str:
    import torch

    assert isinstance(value, torch.Tensor)
    if value.numel() <= 12:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})" + (
            f".reshape({list(value.shape)})" if value.numel() == 0 else ""
        )
    return f"torch.randn({list(value.shape)})" if value.dtype.is_floating_point else f"…  # {list(value.shape)}"


def _raw(defect: Defect) -> str:
    raw = defect.raw
    if raw.symptom is Symptom.REJECTED:
        return f"`{raw.error}`, with a message that matches `{raw.message}`."
    return f"{raw.wrong}."


if __name__ == "__main__":
    write_page()
