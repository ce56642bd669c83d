"""Runs the benchmarks of `perf/` in a process of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from conformance.support.commands import run_code
from harness.core.settings import REPOSITORY


def run_benchmarks(results: Path, *words: str) -> list[dict[str, Any]]:
    """Runs pytest with these words, and returns the benchmarks that it writes into the file `results`.

    In a worker of pytest-xdist, which a variable tells, pytest-benchmark would measure nothing.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    code = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    done = run_code(code, *words, f"--benchmark-json={results}", folder=REPOSITORY, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    benchmarks: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))["benchmarks"]
    return benchmarks
