"""Defines the modules of `conformance.support.small_network`, and the input of both."""

from __future__ import annotations

import torch
from torch import nn

from conformance.support.small_network import CHANNELS, TOKENS
from harness.compiler.lowering.groups import note_paths


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
