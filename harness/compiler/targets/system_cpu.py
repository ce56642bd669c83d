"""Caches LLVM's description of this machine's CPU on disk, and identifies the build of TVM by its libraries.

Importing TVM to ask for either takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.core.errors import HarnessError
from harness.core.files import cache_root, write_json
from harness.runtime.system import ROOT, read_text


@cache
def tvm_build() -> tuple[str, ...]:
    """Returns name, size and date of each of TVM's libraries, in order; empty if TVM is not installed.

    The folders are those of `tvm.libinfo.package_lib_paths`, which cannot be called without importing TVM: a wheel's
    folder, and those of a build in the source tree.
    """
    package = find_spec("tvm")
    if package is None or package.origin is None:
        return ()
    installed = Path(package.origin).parent
    tree = installed.parents[1]
    library_path = os.environ.get("TVM_LIBRARY_PATH")
    folders = [*([Path(library_path)] if library_path else []), installed / "lib", tree / "build" / "lib", tree / "lib"]
    return tuple(
        f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for folder in folders
        for path in sorted(folder.glob("libtvm*"))
    )


FILE = "cpu.json"
"""Name of the file in the cache's folder."""

_IDENTIFYING_LINES = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features")
"""Beginnings of the lines of `/proc/cpuinfo` that LLVM reads, or that distinguish processors."""


@dataclass(frozen=True)
class SystemCpu:
    """LLVM's name of a CPU, and the features that it connects with the name.

    Attributes:
        name: The name, for instance `znver4`.
        features: The features in order, for instance `avx512bf16`.
    """

    name: str
    features: tuple[str, ...]


@cache
def system_cpu() -> SystemCpu:
    """Returns LLVM's description of this machine's CPU.

    Each process asks LLVM if the system does not describe its processor or the cache cannot be used.
    """
    conditions = _conditions()
    path = cache_root() / FILE
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        if conditions is not None and stored["made by"] == conditions:
            return SystemCpu(str(stored["name"]), tuple(map(str, stored["features"])))
    cpu = _query_llvm()
    if conditions is not None:
        with contextlib.suppress(HarnessError, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"made by": conditions, **asdict(cpu)})
    return cpu


def _query_llvm() -> SystemCpu:
    import tvm
    from tvm.target import codegen

    name = str(codegen.llvm_get_system_cpu())
    features = codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": name}))
    return SystemCpu(name, tuple(sorted(map(str, features))))


def _conditions() -> dict[str, Any] | None:
    """Returns all that the description depends on, as JSON data; None if the system does not describe its processor."""
    lines = read_text(ROOT / "proc/cpuinfo").splitlines()
    processors = sorted({line for line in lines if line.startswith(_IDENTIFYING_LINES)})
    build = tvm_build()
    return {"processors": processors, "tvm": list(build)} if processors and build else None
