"""Runs the benchmarks of `perf/` in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.core.settings import REPOSITORY


def run_benchmarks(results: Path, *words: str) -> list[dict[str, Any]]:
    """Runs pytest with these words, and returns the benchmarks that it writes into the file `results`.

    In a worker of pytest-xdist, which a variable tells, pytest-benchmark would measure nothing.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, f"--benchmark-json={results}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        timeout=600,
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    benchmarks: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))["benchmarks"]
    return benchmarks
