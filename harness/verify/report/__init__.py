"""Builds reports: JSON is the truth; Markdown and HTML are rendered from it."""

from __future__ import annotations

from harness.verify.report.verification.document import Result, read_report, repro_command
from harness.verify.report.verification.pages import render_report
from harness.verify.report.verification.writer import ADVICE, write_report

__all__ = ["ADVICE", "Result", "read_report", "render_report", "repro_command", "write_report"]
