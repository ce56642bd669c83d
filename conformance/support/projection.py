"""A model from outside the package with an option of its own: a layer as wide as `sam3-tvm compile` is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from harness.compiler.deployment.deployable import Deployable, ModelOptions
from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.model import Model
from harness.runtime.manifest import Manifest

if TYPE_CHECKING:
    import torch

NAME, INPUTS, ROWS = "projection", 8, 3


@dataclass(frozen=True)
class Width(ModelOptions):
    width: Annotated[int, typer.Option(min=1, help="Outputs of the layer.")] = 4

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Self:
        return cls(**manifest.extra)

    def manifest_part(self, settings: Settings) -> Mapping[str, Any]:
        return asdict(self)

    def summary(self) -> str:
        return f"{self.width} outputs"


def layer(seed: int, width: int) -> torch.nn.Linear:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(INPUTS, width).eval().requires_grad_(False)


def programs(case: Case, _settings: Settings, options: Width) -> Iterator[Program]:
    import torch

    yield Program("project", layer(case.seed, options.width), {"input": torch.zeros(ROWS, INPUTS)}, ("y",))


MODEL = Model(NAME, {}, Deployable(NAME, programs, options=Width))
