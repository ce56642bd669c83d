"""The entry points of a compiled folder that a question calls, in order, with their inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from harness.runtime.artifact import Artifact, LoadedModel, Tensors
from harness.runtime.sam3.model import Sam3


@dataclass(frozen=True)
class EntryCall:
    """A call of an entry point.

    Attributes:
        entry: Its name.
        run: Makes it again, with the same inputs.
    """

    entry: str
    run: Callable[[], Tensors]


class Recorder:
    """A loaded artifact that notes its calls; as `harness.runtime.artifact.LoadedModel`.

    Attributes:
        folder: The artifact's folder.
        manifest: What it says about itself.
        calls: The calls so far, in order.
    """

    def __init__(self, artifact: LoadedModel) -> None:
        self.folder, self.manifest = artifact.folder, artifact.manifest
        self.calls: list[EntryCall] = []
        self._artifact = artifact

    def call(self, entry: str, **inputs: Any) -> Tensors:
        """Runs an entry point."""
        self.calls.append(EntryCall(entry, lambda: self._artifact.call(entry, **inputs)))
        return self.calls[-1].run()

    def fetch(self, tensor: Any, /) -> npt.NDArray[Any]:
        """Returns a tensor's values."""
        return self._artifact.fetch(tensor)

    def reading_once(self, _entry: str, /) -> AbstractContextManager[None]:
        """Keeps the memory of an entry point's weights: its call is made again."""
        return nullcontext()


def calls_of(folder: Path, question: Callable[[Sam3], object]) -> tuple[Artifact, list[EntryCall]]:
    """Loads a folder that `sam3-tvm compile` wrote, and returns what a question calls of it."""
    artifact = Artifact.load(folder)
    recorder = Recorder(artifact)
    question(Sam3(recorder))
    return artifact, recorder.calls
