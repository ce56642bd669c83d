"""Results that outlive a run: a file for each benchmark, written as soon as it is measured.

    pytest perf/test_components.py --scale full --peers --keep measured
    sam3-tvm report measured/*.json --out docs/evidence/

A run of hours that was interrupted, or that is done in parts, measures with the same folder what it does not hold yet.
What lies there counts only if it is from the same code, options, machine and versions.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.utils import safe_dumps

from harness.core.files import write_text
from harness.core.machine import describe_machine, versions
from perf import peers

KEPT = pytest.StashKey[dict[str, Any]]()
"""Under which conditions this run measures."""

_ROOT = Path(__file__).resolve().parents[1]
_CODE = ("harness", "perf", "fixtures")
"""Folders whose files decide what is measured, and how fast it is."""
_MACHINE = ("cpu", "features", "gpus", "threads", "system", "python")
_OPTIONS = ("seed", "db", "untuned", "peers", "peer", "rounds", "budget", "cpu", "cuda_arch")
"""Options that are no part of a benchmark's name."""


def conditions(config: pytest.Config) -> dict[str, Any]:
    """Returns what a kept result has to agree with, as plain data."""
    machine = describe_machine()
    found = {
        "code": _digest_of_code(),
        "machine": {name: machine[name] for name in _MACHINE},
        "versions": versions() | peers.versions(),
        "options": {name: config.getoption(name) for name in _OPTIONS},
    }
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


def kept_before(item: pytest.Item) -> str | None:
    """Returns when a benchmark was measured under the conditions of this run; None if it has to be measured."""
    folder = item.config.getoption("keep")
    if folder is None or "benchmark" not in getattr(item, "fixturenames", ()):
        return None
    try:
        kept = json.loads(_file(folder, item.nodeid).read_text(encoding="utf-8"))
        same = kept["kept"] == item.config.stash[KEPT] and kept["benchmarks"][0]["fullname"] == item.nodeid
        return str(kept["datetime"]) if same else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep(item: pytest.Item) -> None:
    """Writes what a benchmark that has passed measured, in the format of `--benchmark-json`.

    Raises:
        HarnessError: The file cannot be written.
    """
    folder, config = item.config.getoption("keep"), item.config
    session: Any = getattr(config, "_benchmarksession", None)
    measured = [one for one in session.benchmarks if one.fullname == item.nodeid] if folder and session else []
    if not measured:
        return
    result = config.hook.pytest_benchmark_generate_json(
        config=config,
        benchmarks=measured,
        include_data=False,
        machine_info=session.get_machine_info(),
        commit_info=config.hook.pytest_benchmark_generate_commit_info(config=config),
    )
    # As pytest-benchmark does it: among the parameters of a test may be anything.
    write_text(_file(folder, item.nodeid), safe_dumps(result | {"kept": config.stash[KEPT]}, indent=1) + "\n")


def _file(folder: Path, name: str) -> Path:
    """Returns the file of a benchmark: no two names that differ share one."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return folder / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
