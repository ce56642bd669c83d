"""Checks that the installation includes the compiler; the base installation only runs compiled models."""

from __future__ import annotations

from importlib.util import find_spec

from harness.core.errors import HarnessError

COMPILES = ("tvm", "torch", "sam3")
"""Modules that compiling and verifying need, all from the extra `verify`."""


def require_compiler() -> None:
    """Checks that this installation can compile and verify.

    Raises:
        HarnessError: This is the base installation.
    """
    modules = [name for name in COMPILES if find_spec(name) is None]
    if modules:
        names = " and ".join(filter(None, [", ".join(modules[:-1]), modules[-1]]))
        raise HarnessError(
            f"{names} {'is' if len(modules) == 1 else 'are'} not installed: this installation runs compiled models; "
            "to compile and verify them, pip install 'sam3-tvm[verify]'"
        )
