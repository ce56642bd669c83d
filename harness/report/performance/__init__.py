"""The performance report: pytest-benchmark's JSON is the truth, a page and plots are rendered from it."""

from __future__ import annotations

from harness.report.performance.writer import write_performance_report

__all__ = ["write_performance_report"]
