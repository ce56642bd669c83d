"""Defines a model, which has subjects to verify and entry points to deploy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.compiler.deployment.deployable import Deployable
from harness.core.checkpoint_file import CheckpointDescription
from harness.core.settings import Settings
from harness.models.subject import Subject


@dataclass(frozen=True)
class Model:
    """A model that the harness verifies.

    Attributes:
        name: Registry key.
        subjects: The components and the whole models, by name.
        deployable: The entry points that `sam3-tvm compile` writes into a folder; None if the model cannot be deployed.
        context: Returns the context in which the model is built, run and exported.
        describe_checkpoint: Returns what a file or folder of weights is and can do, from its names; None if the model
            takes none.
        inspect_checkpoint: Returns everything that is known about one, as JSON has it.
        expectations: File that lists the cases that are not expected to be strict, see `harness.core.expectations`.
        prepare: Imports the libraries whose import takes seconds.
        check: Checks the settings of a verification, before the first case; raises an error that is a sentence.
    """

    name: str
    subjects: Mapping[str, Subject]
    deployable: Deployable | None = None
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    prepare: Callable[[], None] = lambda: None
    check: Callable[[Settings], None] = lambda settings: None
    describe_checkpoint: Callable[[Path], CheckpointDescription] | None = None
    inspect_checkpoint: Callable[[Path], Mapping[str, Any]] | None = None
    expectations: Path | None = None
