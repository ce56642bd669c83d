"""Model: its subjects to verify, and its entry points to deploy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from harness.deployment.deployable import Deployable
from harness.models.subject import Subject


def _nothing() -> None:
    """Prepares nothing: the model's libraries need no preparation."""


@dataclass(frozen=True)
class Model:
    """A model that the harness verifies.

    Attributes:
        name: Registry key.
        subjects: Its components and the whole model, by name.
        deployable: What `sam3-tvm compile` makes a folder of; None if it cannot be deployed.
        context: What building, running and exporting happen in.
        expectations: File of the cases that are not expected to be strict, see `harness.core.expectations`.
        prepare: Imports the libraries that building takes seconds to import.
    """

    name: str
    subjects: Mapping[str, Subject]
    deployable: Deployable | None = None
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    prepare: Callable[[], None] = _nothing
    expectations: Path | None = None
