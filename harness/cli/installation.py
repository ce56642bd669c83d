"""What is installed: the base, which runs compiled models, or with it what compiles and verifies them."""

from __future__ import annotations

from importlib.util import find_spec

from harness.core.errors import HarnessError

COMPILES = ("tvm", "torch", "sam3")
"""Modules that compiling and verifying need, all from the extra `verify`."""


def require_compiler() -> None:
    """Nothing, if this installation can compile and verify.

    Raises:
        HarnessError: It is the base installation.
    """
    missing = [name for name in COMPILES if find_spec(name) is None]
    if missing:
        named = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise HarnessError(
            f"{named} {'is' if len(missing) == 1 else 'are'} not installed: this installation runs compiled models; "
            "to compile and verify them, pip install 'sam3-tvm[verify]'"
        )
