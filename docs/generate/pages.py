"""Lists the generated pages with the functions that render them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from docs.generate import defects, reference
from docs.generate.figures import DOCS
from harness.verify.report.verification.document import read_report
from harness.verify.report.verification.pages import render_overview


def verification() -> str:
    """Returns the overview of the stored verification report."""
    return render_overview(read_report(DOCS / "evidence" / "verification_report.json"))


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/commands.md": reference.commands,
    "reference/python.md": reference.python,
    "reference/entry-points.md": reference.entry_points,
    "reference/settings.md": reference.settings,
    "reference/exit-codes.md": reference.exit_codes,
    "reference/expectations.md": reference.expectations,
    "reference/report.md": reference.report_schema,
    "reference/operators.md": reference.operators,
    "reference/claims.md": reference.claims,
    "evidence/verification.md": verification,
    "evidence/defects.md": defects.overview,
    "reference/defects-torch.md": defects.torch_page,
    "reference/defects-onnx.md": defects.onnx_page,
}
"""Every generated page but that of performance, which `sam3-tvm report` writes with its pictures."""
