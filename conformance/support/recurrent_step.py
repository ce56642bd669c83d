"""Defines the module of `conformance.support.recurrent_segmenter`."""

from __future__ import annotations

import torch

from conformance.support.recurrent_segmenter import CHANNELS, TOKENS


class Step(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.attend = torch.nn.Linear(CHANNELS, CHANNELS)
        self.segment = torch.nn.Linear(CHANNELS, 1)
        angles = torch.outer(torch.arange(TOKENS), 0.5 ** torch.arange(CHANNELS // 2))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles))

    def forward(self, frame: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = torch.view_as_complex(self.attend(frame).reshape(TOKENS, CHANNELS // 2, 2))
        rotated = torch.view_as_real(pairs * self.table).reshape(TOKENS, CHANNELS)
        remembered = (rotated @ memory.T / 4).softmax(-1) @ memory + rotated
        return self.segment(remembered), 0.5 * memory + 0.5 * remembered.tanh()
