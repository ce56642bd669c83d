"""A model from outside the package with a component and an entry point that take its parts under other names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from harness.compiler.deployment.deployable import Deployable
from harness.compiler.lowering.groups import note_paths
from harness.core.case import Case
from harness.core.program import Call, Program
from harness.core.settings import Settings
from harness.models.model import Model
from harness.models.subject import Subject, Workload
from harness.models.traced import open_trace

NAME, TOKENS, CHANNELS = "small_network", 160, 64
GROUPS = ("trunk.0", "trunk.2", "head", "scale")
"""Paths of the layers in the model, in the order in which they are computed."""


class Network(nn.Module):
    """The whole model: two layers, and two heads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Sequential(
            nn.Linear(CHANNELS, 128), nn.GELU(), nn.Linear(128, CHANNELS), nn.LayerNorm(CHANNELS)
        )
        self.head = nn.Linear(CHANNELS, 96)
        self.scale = nn.Linear(CHANNELS, 64, bias=False)


class Perceptron(nn.Module):
    """The component."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.layers, self.head, self.scale = model.trunk, model.head, model.scale

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.layers(tokens)
        return self.head(features), self.scale(features)


class Deployed(nn.Module):
    """The entry point."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"first": model.trunk[0], "second": model.trunk[2], "last": model.head})

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = nn.functional.gelu(self.inside["first"](tokens))
        return (self.inside["last"](self.inside["second"](hidden)),)


def network(seed: int) -> Network:
    model = Network(seed).eval().requires_grad_(False)
    note_paths(model)
    return model


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))


def open_perceptron(case: Case, _settings: Settings) -> Workload:
    program = Program("run", Perceptron(network(case.seed)), {"tokens": tokens()}, OUTPUTS)
    return open_trace(case, {program.name: program}, [Call("only", program.name, (tokens(),))])


def programs(case: Case, _settings: Settings, _options: object = None) -> Iterator[Program]:
    yield Program("deployed", Deployed(network(case.seed)), {"tokens": tokens()}, ("features",))


OUTPUTS = ("features", "scales")
PERCEPTRON = Subject("perceptron", "two layers and two heads", ("tokens",), OUTPUTS, open_perceptron, NAME)
MODEL = Model(NAME, {PERCEPTRON.name: PERCEPTRON}, Deployable(NAME, programs))
