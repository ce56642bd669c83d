"""The runs of upstream's model that components take their inputs from, and how what they captured is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

if TYPE_CHECKING:
    import torch


class Inputs(Protocol):
    """What a run is about; its `repr` without the folders of files says all but the pixels."""

    @property
    def images(self) -> tuple[Path, ...]:
        """The files that are read."""


@dataclass(frozen=True)
class Capture:
    """One run of upstream's model, from which components take their inputs.

    Attributes:
        kind: What its cached arrays are called.
        module: The module that runs it. It has `load_inputs(image)`, which reads what the run is about, about another
            photograph if one is given; `capture(model, inputs)`, which runs; and `Activations`, what that returns: a
            frozen dataclass of tensors and of such dataclasses.
        interactive: Whether upstream's model must be built with its tracker.
    """

    kind: str
    module: str
    interactive: bool

    def load_inputs(self, image: Path | None) -> Inputs:
        """What the run is about; of another photograph if one is given."""
        inputs: Inputs = import_module(self.module).load_inputs(image)
        return inputs

    def run(self, model: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Runs upstream's model, inside `upstream()`; the captured tensors by name."""
        return flattened(import_module(self.module).capture(model, inputs))

    def restored(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The module's `Activations` from what `run` returned."""
        return restored(import_module(self.module).Activations, tensors)


def flattened(activations: Any) -> dict[str, torch.Tensor]:
    """The tensors of a dataclass by name; those of a dataclass inside it as `field/name`."""
    tensors: dict[str, torch.Tensor] = {}
    for field in fields(activations):
        value = getattr(activations, field.name)
        inner = flattened(value) if is_dataclass(value) else {"": value}
        tensors |= {f"{field.name}/{name}" if name else field.name: tensor for name, tensor in inner.items()}
    return tensors


def restored(kind: type[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """The dataclass that `flattened` took apart."""
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        prefix = f"{name}/"
        if is_dataclass(hint):
            inner = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            arguments[name] = restored(hint, inner)  # type: ignore[arg-type]  # a hint is a class here
        else:
            arguments[name] = tensors[name]
    return kind(**arguments)


GROUNDING = Capture("activations", "harness.models.sam3.capture", interactive=False)
"""`forward_grounding` on a photograph with text, box and point."""
CLICKS = Capture("clicks", "harness.models.sam3.tracker.clicks", interactive=True)
"""`predict_inst` on the same photograph."""
PROPAGATION = Capture("propagation", "harness.models.sam3.tracker.propagation", interactive=True)
"""`propagate_in_video` over a clip that is composited from photographs."""
