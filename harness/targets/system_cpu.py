"""What LLVM says of this machine's CPU, kept on disk: a process takes seconds to import TVM and ask."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from harness.core.errors import HarnessError
from harness.files import cache_root, write_json
from harness.runtime.system import ROOT, read_text
from harness.targets.tvm_build import tvm_build

FILE = "cpu.json"
"""Name of the file in the folder of the cache."""

_TELLING = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features")
"""Beginnings of the lines of `/proc/cpuinfo` that LLVM goes by, or that tell processors apart."""


@dataclass(frozen=True)
class SystemCpu:
    """LLVM's name of a CPU, and the features that it connects with the name.

    Attributes:
        name: For instance `znver4`.
        features: For instance `avx512bf16`, in order.
    """

    name: str
    features: tuple[str, ...]


@cache
def system_cpu() -> SystemCpu:
    """Returns what LLVM says of this machine's CPU.

    Where the system does not describe its processor or the cache cannot be used, each process asks LLVM.
    """
    made_by = _conditions()
    path = cache_root() / FILE
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if made_by is not None and kept["made by"] == made_by:
            return SystemCpu(str(kept["name"]), tuple(map(str, kept["features"])))
    found = _asked()
    if made_by is not None:
        with contextlib.suppress(HarnessError, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"made by": made_by, **asdict(found)})
    return found


def _asked() -> SystemCpu:
    import tvm
    from tvm.target import codegen

    name = str(codegen.llvm_get_system_cpu())
    features = codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": name}))
    return SystemCpu(name, tuple(sorted(map(str, features))))


def _conditions() -> dict[str, Any] | None:
    """Returns all that the answer depends on, as JSON has it; None where the system does not describe its processor."""
    lines = read_text(ROOT / "proc/cpuinfo").splitlines()
    processors = sorted({line for line in lines if line.startswith(_TELLING)})
    build = tvm_build()
    return {"processors": processors, "tvm": list(build)} if processors and build else None
