"""Processes that run compiled models and nothing else, where PyTorch is installed."""

from __future__ import annotations

import sys


def leave_torch_out() -> None:
    """Makes an import of PyTorch fail in this process, as if it were not installed; what was imported stays.

    `tvm_ffi` imports it wherever it is installed, which takes 1.5 s and 0.6 GB of memory on a Zen 5.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
