"""From an imported module to a library on disk."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
        executable = relax.build(lowered, tvm_target, relax_pipeline=None)
    host = tvm_target.host or tvm_target
    for_macos = host.attrs["mtriple"] == MACOS_TRIPLE if "mtriple" in host.attrs else platform.system() == "Darwin"
    executable.export_library(str(library), fcompile=partial(link, for_macos=for_macos))
