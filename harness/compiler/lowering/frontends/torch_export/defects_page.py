"""Writes docs/DEFECTS.md from the registry of defects, when run as a program."""

from __future__ import annotations

from harness.compiler.lowering.frontends.defect import TESTED_VERSION
from harness.compiler.lowering.frontends.defects_page import render_page
from harness.compiler.lowering.frontends.torch_export.defects import DEFECTS
from harness.core.files import make_folder, write_text
from harness.core.settings import REPOSITORY

PAGE = REPOSITORY / "docs" / "DEFECTS.md"

_INTRODUCTION = f"""# Defects of TVM's PyTorch frontend

Seen in apache-tvm {TESTED_VERSION}, with `torch.export` and `tvm.relax.frontend.torch.from_exported_program`. Each is
worked around in `harness/compiler/lowering/frontends/torch_export/defects/`.
`conformance/lowering/test_frontend_defects.py` runs every reproduction below:
unmodified TVM must fail as described (a release that repairs a defect fails the test, so that the workaround goes), and
with the workaround the result must be PyTorch's. `conformance/lowering/test_operators.py`
holds every operator that SAM 3's
components use to PyTorch and to float64, on the components' own shapes and around them.

This page is generated: `python -m harness.compiler.lowering.frontends.torch_export.defects_page`.
"""

_INSTRUCTIONS = """## Running a reproduction

    from harness.compiler.lowering.frontends.torch_export.defects import DEFECTS
    from harness.compiler.lowering.frontends.running import run_torch
    from harness.compiler.lowering.frontends.torch_export.running import run_raw, run_tvm

    defect = next(defect for defect in DEFECTS if defect.name == "grid_sample_layout")
    module, args = defect.reproduction()
    run_torch(module, args), run_tvm(module, args), run_raw(module, args)
"""


def render() -> str:
    """Returns the page."""
    return render_page(_INTRODUCTION, _INSTRUCTIONS, DEFECTS, "Unmodified TVM")


if __name__ == "__main__":
    make_folder(PAGE.parent)
    write_text(PAGE, render())
