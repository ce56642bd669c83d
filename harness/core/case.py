"""Defines the case, the unit of verification, and the distributions that weights are drawn from without a checkpoint.

A case is one subject × strategy × target × scale × seed × precision × frontend × weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from harness.core.precision import DEFAULT_PRECISION, PRECISIONS


class Weights(StrEnum):
    """The statistics of drawn weights: even, or with the outliers of trained weights."""

    SEEDED = "seeded"
    OUTLIERS = "outliers"

    @property
    def ill_conditioned(self) -> bool:
        """Returns whether PyTorch fp32 itself may leave the strict gate, so that the oracle decides."""
        return self is Weights.OUTLIERS


WEIGHTS = tuple(kind.value for kind in Weights)
"""Names of all distributions."""


DEFAULT_STRATEGY = "real"
"""The strategy that applies to every subject, with or without rotary position encoding."""

DEFAULT_FRONTEND = "torch"
"""The default frontend: torch.export and TVM's importer of exported programs."""


class Scale(StrEnum):
    """The part of the published model that is built, where its numbers are judged."""

    SHALLOW = "shallow"
    FULL = "full"


TINY = "tiny"
"""A scale with narrow encoders, for tests of folders and processes: it is compiled, and its numbers are not judged."""


@dataclass(frozen=True, order=True)
class Case:
    """One subject × strategy × target × scale × seed × precision × frontend × weights, all by registry name.

    Attributes:
        component: Name of the subject, a component or a whole model.
        strategy: Name of the strategy that makes rotary position encoding compilable.
        target: Name of the compilation target.
        scale: The part of the published model that is built.
        seed: Seed of the weights.
        precision: Type of the weights and of the operands of products.
        frontend: Name of the frontend, which turns the PyTorch module into a Relax module.
        weights: Distribution of the drawn weights: even, or with the outliers of trained weights.
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
        for people; programs store a case as its fields.
        """
        return "-".join([self.component, self.strategy, self.target, str(self.scale), *self.nondefaults.values()])

    @property
    def ill_conditioned(self) -> bool:
        """Returns whether the strict gate counts, which PyTorch fp32 itself may leave with these weights."""
        return Weights(self.weights).ill_conditioned and not PRECISIONS[self.precision].judged_by_oracle

    @property
    def nondefaults(self) -> dict[str, str]:
        """The precision, frontend and weights by name, without those that have their default."""
        values = {"precision": self.precision, "frontend": self.frontend, "weights": str(self.weights)}
        defaults = {"precision": DEFAULT_PRECISION, "frontend": DEFAULT_FRONTEND, "weights": Weights.SEEDED}
        return {name: value for name, value in values.items() if value != defaults[name]}

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON stores them."""
        return {**asdict(self), "scale": str(self.scale), "weights": str(self.weights)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Case:
        """Reads a case from JSON: missing fields have their defaults, unknown keys are ignored."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})
