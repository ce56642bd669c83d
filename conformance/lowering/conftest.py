"""Provides what the tests of rotary position encoding ask of upstream."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from harness.models.sam3.upstream import upstream


@pytest.fixture(scope="module")
def sam3() -> Iterator[SimpleNamespace]:
    """The upstream modules with RoPE inside."""
    with upstream():
        import sam3.model.vitdet as trunk
        import sam3.sam.rope as tracker_rope
        import sam3.sam.transformer as tracker

        yield SimpleNamespace(trunk=trunk, tracker=tracker, tracker_rope=tracker_rope)
