"""Writes docs/ONNX_DEFECTS.md from the registry of defects, when run as a program."""

from __future__ import annotations

from harness.compiler.lowering.frontends.defect import TESTED_VERSION
from harness.compiler.lowering.frontends.defects_page import render_page
from harness.compiler.lowering.frontends.onnx.defects import DEFECTS
from harness.compiler.lowering.frontends.onnx.exporting import OPSET
from harness.core.files import make_folder, write_text
from harness.core.settings import REPOSITORY

PAGE = REPOSITORY / "docs" / "ONNX_DEFECTS.md"

_INTRODUCTION = f"""# Defects on the way through ONNX

Seen in apache-tvm {TESTED_VERSION} and PyTorch's exporter (`torch.onnx.export(dynamo=True)`, opset {OPSET}), with
`tvm.relax.frontend.onnx.from_onnx`. Each is worked around in `harness/compiler/lowering/frontends/onnx/defects/`.
`conformance/lowering/test_onnx_defects.py` runs every reproduction below: unmodified, it must fail as described (a
release that repairs a defect fails the test, so that the workaround goes), and with the workaround the result must be
PyTorch's. `docs/FRONTENDS.md` has what is known and not worked around, and compares this way with that of torch.export.

This page is generated: `python -m harness.compiler.lowering.frontends.onnx.defects_page`.
"""

_INSTRUCTIONS = """## Running a reproduction

    from harness.compiler.lowering.frontends.onnx.defects import DEFECTS
    from harness.compiler.lowering.frontends.onnx.running import run_raw, run_tvm
    from harness.compiler.lowering.frontends.running import run_torch

    defect = next(defect for defect in DEFECTS if defect.name == "resize_antialias")
    module, args = defect.reproduction()
    run_torch(module, args), run_tvm(module, args), run_raw(module, args)
"""


def render() -> str:
    """Returns the page."""
    return render_page(_INTRODUCTION, _INSTRUCTIONS, DEFECTS, "Unmodified")


if __name__ == "__main__":
    make_folder(PAGE.parent)
    write_text(PAGE, render())
