"""Defines the runs of upstream's model that components take their inputs from, and names the captured tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from harness.models.sam3.fixtures import Fixture

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Capture:
    """One run of upstream's model, from which components take their inputs.

    Attributes:
        kind: Kind of the cached arrays.
        module: The module that runs it. It has `load_inputs(image)`, which reads the inputs of the run, with another
            photograph if one is given; `capture(model, inputs)`, which runs the model; and `Activations`, the result: a
            frozen dataclass of tensors and of such dataclasses.
        interactive: Whether upstream's model must be built with its tracker.
    """

    kind: str
    module: str
    interactive: bool

    def load_inputs(self, image: Path | None) -> Fixture:
        """Returns the inputs of the run, with another photograph if one is given."""
        inputs: Fixture = import_module(self.module).load_inputs(image)
        return inputs

    def run(self, model: Any, inputs: Fixture) -> dict[str, torch.Tensor]:
        """Runs upstream's model, inside `upstream()`, and returns the captured tensors by name."""
        return flatten(import_module(self.module).capture(model, inputs))

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Returns the module's `Activations` from the tensors that `run` returned."""
        return restore(import_module(self.module).Activations, tensors)


def flatten(activations: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a dataclass by name; a tensor of a nested dataclass is named `field/name`."""
    tensors: dict[str, torch.Tensor] = {}
    for field in fields(activations):
        value = getattr(activations, field.name)
        inner = flatten(value) if is_dataclass(value) else {"": value}
        tensors |= {f"{field.name}/{name}" if name else field.name: tensor for name, tensor in inner.items()}
    return tensors


def restore(kind: type[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the dataclass whose tensors `flatten` named."""
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        prefix = f"{name}/"
        if is_dataclass(hint):
            inner = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            arguments[name] = restore(hint, inner)  # type: ignore[arg-type]  # a hint is a class here
        else:
            arguments[name] = tensors[name]
    return kind(**arguments)


GROUNDING = Capture("activations", "harness.models.sam3.capture", interactive=False)
"""`forward_grounding` on a photograph with text, box and point."""
CLICKS = Capture("clicks", "harness.models.sam3.tracker.clicks", interactive=True)
"""`predict_inst` on the same photograph."""
PROPAGATION = Capture("propagation", "harness.models.sam3.tracker.propagation", interactive=True)
"""`propagate_in_video` over a clip that is composited from photographs."""
