"""From an imported module to a library on disk."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.runtime.cpu import VECTOR_FEATURES
from harness.runtime.loading import REQUIRED_CPU
from harness.targets.linking import MACOS_TRIPLE, link
from harness.targets.target import Target

if TYPE_CHECKING:
    import tvm

LIBRARY_SUFFIX = ".so"


def compile_module(module: tvm.IRModule, target: Target, library: Path) -> None:
    """Compile an imported module with the target's pipeline and write the library.

    Args:
        module: From `harness.frontend.import_program`.
        target: What to compile for.
        library: Where to write; ends in `LIBRARY_SUFFIX`.

    Raises:
        RuntimeError: There is nothing to link with; the target's `compile_problem` tells so beforehand.
    """
    import tvm
    from tvm import relax

    tvm_target = target.tvm_target()
    with tvm_target, tvm.transform.PassContext(opt_level=3):
        lowered = target.pipeline(tvm_target)(module)
        lowered = _with_required_cpu(lowered, tvm_target.host or tvm_target)
        executable = relax.build(lowered, tvm_target, relax_pipeline=None)
    host = tvm_target.host or tvm_target
    for_macos = host.attrs["mtriple"] == MACOS_TRIPLE if "mtriple" in host.attrs else platform.system() == "Darwin"
    executable.export_library(str(library), fcompile=partial(link, for_macos=for_macos))


def required_cpu(host: tvm.target.Target) -> tuple[str, list[str]]:
    """LLVM's name of the CPU that host code is compiled for, and the features of it that the code may use."""
    from tvm.target import codegen

    promised = codegen.llvm_get_cpu_features(host)
    name = str(host.attrs["mcpu"]) if "mcpu" in host.attrs else "generic"
    return name, [feature for feature in VECTOR_FEATURES if feature in promised]


def _with_required_cpu(lowered: tvm.IRModule, host: tvm.target.Target) -> tvm.IRModule:
    """Adds the function that tells `harness.runtime.loading` what the library needs."""
    from tvm import ir, relax

    name, features = required_cpu(host)
    text = ir.StringImm(" ".join([name, *features]))
    function = relax.Function([], text, relax.AnyType()).with_attr("global_symbol", REQUIRED_CPU)
    marked = lowered.clone()
    marked[REQUIRED_CPU] = function
    return marked
