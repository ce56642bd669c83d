"""Hides PyTorch from processes that only run compiled models."""

from __future__ import annotations

import sys


def hide_torch() -> None:
    """Makes imports of PyTorch fail in this process as if it were not installed, unless it is imported already.

    `tvm_ffi` imports it wherever it is installed, which takes 1.5 s and 0.6 GB of memory on a Zen 5.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
