"""Builds the shallow models with seed 0 and their results on the photograph, once per process.

Inside `drawn_by` they have other weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.core.case import Case, Weights
from harness.core.settings import SEEDED, Settings
from harness.models.sam3.build import build_case
from harness.models.sam3.captures import GROUNDING, Activations, Capture
from harness.models.sam3.upstream import upstream


def build_model(
    scale: str, seed: int = 0, checkpoint: Path | None = None, *, interactive: bool = False, **settings: Any
) -> Any:
    """Builds the model of a scale with seeded weights or those of a checkpoint."""
    return build_case(Case("", "real", "llvm", scale, seed), Settings(checkpoint, **settings), interactive=interactive)


class _Shallow:
    """The models of one kind of weights, and what they compute."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._captured: dict[Capture, Any] = {}

    @cached_property
    def model(self) -> Any:
        return build_case(self._case, SEEDED)

    @cached_property
    def interactive(self) -> Any:
        return build_case(self._case, SEEDED, interactive=True)

    @property
    def _case(self) -> Case:
        return Case("", "real", "llvm", "shallow", weights=self._weights)

    @cached_property
    def photograph(self) -> Activations:
        """Of the vision transformer, which is most of it, there may be the outputs of an earlier run."""
        from harness.models.sam3.capture import capture, load_inputs
        from harness.models.sam3.source import UpstreamModel

        with upstream(), UpstreamModel(self._case, SEEDED).shared_trunk(self.model):
            return capture(self.model, load_inputs())

    def captured(self, capture: Capture) -> Any:
        from harness.models.sam3.source import UpstreamModel

        if capture not in self._captured:
            model = self.interactive if capture.interactive else self.model
            with upstream():
                self._captured[capture] = UpstreamModel(self._case, SEEDED).captured(capture, model)
        return self._captured[capture]


_IN_USE = [_Shallow(Weights.SEEDED)]


def forget() -> None:
    """Lets the models go, with what they computed."""
    _IN_USE[:] = [_Shallow(Weights.SEEDED)]


@contextmanager
def drawn_by(weights: Weights) -> Iterator[None]:
    """Draws the weights of this module's functions by a distribution in the context, and drops their results."""
    _IN_USE.append(_Shallow(weights))
    try:
        yield
    finally:
        _IN_USE.pop()


def shallow_model() -> Any:
    """Returns `build_model("shallow", 0)`, which is shared: changes must be undone."""
    return _IN_USE[-1].model


def interactive_model() -> Any:
    """Returns the shallow model with upstream's SAM 2 neck and tracker, which is shared, too."""
    return _IN_USE[-1].interactive


def photograph(*, as_in_memory: bool = False) -> Activations:
    """Returns the tensors between the parts of the shallow model on the photograph with its prompts.

    If they are to lie in memory as upstream passes them on, which the cache does not keep, the model runs.
    """
    return _IN_USE[-1].photograph if as_in_memory else captured(GROUNDING)


def captured(capture: Capture) -> Any:
    """Returns the captures of a run of the shallow model, cached on disk, because a run takes a minute."""
    return _IN_USE[-1].captured(capture)
