"""Reports: JSON is the truth, Markdown is rendered from it."""

from __future__ import annotations

from harness.report.verification.document import Result, read_report, repro_command
from harness.report.verification.markdown import render, render_report
from harness.report.verification.writer import check_writable, write_report

__all__ = ["Result", "check_writable", "read_report", "render", "render_report", "repro_command", "write_report"]
