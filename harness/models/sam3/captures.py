"""Defines the runs of upstream's model that components take their inputs from, and names the captured tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.models.sam3.fixtures import Fixture

if TYPE_CHECKING:
    import torch

BUILDER = "harness.models.sam3.build"
"""The module that builds SAM 3: its `build_architecture`, `give_weights`, `build_case` and `image_model`."""


class Activations(dict[str, "torch.Tensor"]):
    """Captured tensors by name, which are attributes, too; `activations.click` has those named `click/…`."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if part := {key.removeprefix(f"{name}/"): self[key] for key in self if key.startswith(f"{name}/")}:
            return Activations(part)
        raise AttributeError(name)

    def take(self, *names: str) -> dict[str, torch.Tensor]:
        """Returns the tensors of these names, in this order."""
        return {name: self[name] for name in names}


def named(**parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of several parts, named `part/tensor`."""
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Capture:
    """One run of upstream's model, from which components take their inputs.

    Attributes:
        kind: Kind of the cached arrays.
        module: The module that runs it. It has `load_inputs(image)`, which reads the inputs of the run, with another
            photograph if one is given, and `capture(model, inputs)`, which runs the model and says what it captures.
        interactive: Whether upstream's model must be built with its tracker.
        builder: The module that builds the model, as `BUILDER` builds SAM 3.
    """

    kind: str
    module: str
    interactive: bool
    builder: str = BUILDER

    def load_inputs(self, image: Path | None) -> Fixture:
        """Returns the inputs of the run, with another photograph if one is given."""
        inputs: Fixture = import_module(self.module).load_inputs(image)
        return inputs

    def run(self, model: Any, inputs: Fixture) -> Activations:
        """Runs upstream's model, inside `upstream()`."""
        activations: Activations = import_module(self.module).capture(model, inputs)
        return activations


GROUNDING = Capture("activations", "harness.models.sam3.capture", interactive=False)
"""`forward_grounding` on a photograph with text, box and point."""
CLICKS = Capture("clicks", "harness.models.sam3.tracker.clicks", interactive=True)
"""`predict_inst` on the same photograph."""
PROPAGATION = Capture("propagation", "harness.models.sam3.tracker.propagation", interactive=True)
"""`propagate_in_video` over a clip that is composited from photographs."""
