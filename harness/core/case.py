"""Case: subject × strategy × target × scale × seed × precision × frontend × weights, the unit of verification."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from harness.core.precision import DEFAULT_PRECISION
from harness.core.weights import Weights

DEFAULT_STRATEGY = "real"
"""The strategy that applies to every subject, with rotary position encoding inside or not."""

DEFAULT_FRONTEND = "torch"
"""The frontend that is used unless another one is asked for: torch.export and TVM's importer of its programs."""


class Scale(StrEnum):
    """How much of the published model is built."""

    SHALLOW = "shallow"
    FULL = "full"


@dataclass(frozen=True, order=True)
class Case:
    """One subject × strategy × target × scale × seed × precision × frontend × weights, all by registry name.

    Attributes:
        component: Name of the subject, a component or a whole model.
        strategy: How rotary position encoding gets through the compiler.
        target: What is compiled for.
        scale: How much of the published model is built.
        seed: Seed of the weights.
        precision: Type in which weights and operands of products are kept.
        frontend: What turns the PyTorch module into a Relax module.
        weights: What the weights are drawn by: evenly, or with the outliers of trained ones.
    """

    component: str
    strategy: str
    target: str
    scale: str = Scale.SHALLOW.value
    seed: int = 0
    precision: str = DEFAULT_PRECISION
    frontend: str = DEFAULT_FRONTEND
    weights: str = Weights.SEEDED.value

    @property
    def id(self) -> str:
        """The pytest id, for instance `vision_backbone-real-llvm-shallow`.

        A precision other than fp32, a frontend other than the default and weights that are not seeded follow. An id is
        for people: programs write and read a case as its fields.
        """
        parts = [self.component, self.strategy, self.target, str(self.scale)]
        parts += [self.precision] if self.precision != DEFAULT_PRECISION else []
        parts += [self.frontend] if self.frontend != DEFAULT_FRONTEND else []
        parts += [str(self.weights)] if self.weights != Weights.SEEDED else []
        return "-".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, as JSON keeps them."""
        return {**asdict(self), "scale": str(self.scale), "weights": str(self.weights)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """Reads what `to_json` wrote; fields that are missing have their defaults, and other keys are ignored."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})
