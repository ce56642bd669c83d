"""TVM without this project: its own pipeline for CPUs, on the module as this project imports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from perf.sides import IMPORTED, Request

if TYPE_CHECKING:
    import tvm

DEFAULT = "default.so"
"""File of the library."""


def compile_default(request: Request, enter: Callable[[str], None]) -> float:
    """Writes what TVM's default pipeline compiles, and returns the seconds; in a process of its own."""
    from tvm import relax

    module, target = _imported(request)
    start = time.perf_counter()
    enter("compile")
    _build(module, relax.get_default_pipeline(target), target, request.folder / DEFAULT)
    return time.perf_counter() - start


def _imported(request: Request) -> tuple[tvm.IRModule, tvm.target.Target]:
    import tvm

    from harness.compiler.targets import TARGETS

    text = (request.folder / IMPORTED).read_text(encoding="utf-8")
    return tvm.ir.load_json(text), TARGETS[request.target].tvm_target()


def _build(module: tvm.IRModule, pipeline: tvm.transform.Pass, target: tvm.target.Target, library: Path) -> None:
    from tvm import relax

    from harness.compiler.targets.compiling import export_library

    with target:
        export_library(relax.build(module, target, relax_pipeline=pipeline), target, library)
