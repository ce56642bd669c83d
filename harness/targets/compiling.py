"""From an imported module to a library on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
    """
    import tvm
    from tvm import relax

    tvm_target = target.tvm_target()
    with tvm_target, tvm.transform.PassContext(opt_level=3):
        lowered = target.pipeline(tvm_target)(module)
        executable = relax.build(lowered, tvm_target, relax_pipeline=None)
    executable.export_library(str(library))
