"""Runs pytest inside of a test, in the same process."""

from __future__ import annotations

import gc

import pytest


def run_pytest(*arguments: str, plugin: object = None) -> int:
    """Runs pytest in this process, which has imported what takes it seconds; returns its exit status.

    What this process has imported stays frozen, and so no collection goes through it.
    """
    options = ["-q", *(f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "unraisableexception"))]
    with pytest.MonkeyPatch.context() as patch:
        # Its output is read, so the options that this run was given by variable are not for it.
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        patch.setattr(gc, "unfreeze", lambda: None)
        return pytest.main([*options, *arguments], [plugin or object()])
