"""Identifies the build of TVM by its libraries, because importing TVM to ask takes seconds."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path


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
