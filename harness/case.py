"""Case: one component × strategy × target × scale × seed, the unit of verification, parametrization and reporting."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scale(StrEnum):
    """How much of the published model is built; see `harness.model.scales`."""

    SHALLOW = "shallow"
    FULL = "full"


@dataclass(frozen=True, order=True)
class Case:
    """One component × strategy × target × scale × seed, all by registry name."""

    component: str
    strategy: str
    target: str
    scale: str = Scale.SHALLOW.value
    seed: int = 0

    @property
    def id(self) -> str:
        """The pytest id, for instance `vision_backbone-real-llvm-shallow`."""
        return f"{self.component}-{self.strategy}-{self.target}-{self.scale}"
