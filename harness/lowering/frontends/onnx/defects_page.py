"""`python -m harness.lowering.frontends.onnx.defects_page`: writes docs/ONNX_DEFECTS.md from the registry."""

from __future__ import annotations

import inspect
import os
import textwrap
from pathlib import Path

from harness.lowering.frontends.onnx.defect import OnnxDefect
from harness.lowering.frontends.onnx.defects import DEFECTS
from harness.lowering.frontends.onnx.exporting import OPSET
from harness.lowering.frontends.torch_export.defect import TESTED_VERSION, Symptom

PAGE = Path(__file__).resolve().parents[4] / "docs" / "ONNX_DEFECTS.md"

_INTRODUCTION = f"""# Defects on the way through ONNX

Seen in apache-tvm {TESTED_VERSION} and PyTorch's exporter (`torch.onnx.export(dynamo=True)`, opset {OPSET}), with
`tvm.relax.frontend.onnx.from_onnx`. Each is worked around in `harness/lowering/frontends/onnx/defects/`.
`conformance/lowering/test_onnx_defects.py` runs every reproduction below: unmodified, it must fail as described (a
release that repairs a defect fails the test, so that the workaround goes), and with the workaround the result must be
PyTorch's. `docs/FRONTENDS.md` has what is known and not worked around, and compares this way with that of torch.export.

This page is generated: `python -m harness.lowering.frontends.onnx.defects_page`.
"""

_HOW_TO = """## Running a reproduction

    from harness.lowering.frontends.onnx.defects import DEFECTS
    from harness.lowering.frontends.onnx.running import run_raw, run_tvm
    from harness.lowering.frontends.torch_export.running import run_torch

    defect = next(defect for defect in DEFECTS if defect.name == "resize_antialias")
    module, args = defect.reproduction()
    run_torch(module, args), run_tvm(module, args), run_raw(module, args)
"""


def render() -> str:
    """Returns the page's text."""
    rows = [f"| [{defect.title}](#{defect.name}) | {defect.raw.symptom} | `{defect.where}` |" for defect in DEFECTS]
    table = "\n".join(["| defect | symptom | where |", "| --- | --- | --- |", *rows])
    return "\n".join([_INTRODUCTION, table, "", _HOW_TO, *(_section(defect) for defect in DEFECTS)])


def write_page(path: Path = PAGE) -> None:
    """Writes the page, whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(render(), encoding="utf-8")
    os.replace(temporary, path)


def _section(defect: OnnxDefect) -> str:
    module, args = defect.reproduction()
    forward = inspect.getsource(type(module).forward)
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    inputs = "\n".join(f"{name} = {_text(value)}" for name, value in zip(names, args, strict=True))
    reproduction = textwrap.indent(f"{inputs}\n\n{textwrap.dedent(forward)}", "    ")
    return f"""## {defect.name}

{defect.title}.

{defect.what}

{reproduction}
- Unmodified: {_raw(defect)}
- Here: {defect.workaround}
"""


def _text(value: object) -> str:
    import torch

    assert isinstance(value, torch.Tensor)
    if value.numel() == 0:
        return f"torch.zeros({list(value.shape)})"
    if value.numel() <= 12:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return f"torch.randn({list(value.shape)})"


def _raw(defect: OnnxDefect) -> str:
    if defect.raw.symptom is Symptom.REJECTED:
        return f"`{defect.raw.error}`, with a message that matches `{defect.raw.message}`."
    return f"{defect.raw.wrong}."


if __name__ == "__main__":
    write_page()
