"""A model from outside the package: it segments frame after frame and remembers, with complex RoPE inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from harness.compiler.deployment.deployable import Deployable
from harness.core.case import Case
from harness.core.program import Call, Output, Program
from harness.core.settings import Settings
from harness.models.model import Model
from harness.models.subject import Subject, Workload
from harness.models.traced import open_trace

NAME, FRAMES, TOKENS, CHANNELS = "recurrent", 3, 12, 16


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


def programs(case: Case, _settings: Settings, _options: object = None) -> Iterator[Program]:
    example = {"frame": torch.zeros(TOKENS, CHANNELS), "memory": torch.zeros(TOKENS, CHANNELS)}
    yield Program("step", Step(case.seed).eval().requires_grad_(False), example, ("logits", "memory"), uses_rope=True)


def open_clip(case: Case, settings: Settings) -> Workload:
    (step,) = programs(case, settings)
    clip = torch.randn(FRAMES + 1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1))
    states = [clip[FRAMES], *(Output(str(number), "memory") for number in range(FRAMES - 1))]
    trace = [Call(str(n), step.name, (clip[n], state), f"frame_{n}/") for n, state in enumerate(states)]
    return open_trace(case, {step.name: step}, trace)


OUTPUTS = ("logits", "memory")
CLIP = Subject("clip", "three frames and a memory", ("frames",), OUTPUTS, open_clip, NAME, uses_rope=True)
EXPECTATIONS = Path(__file__).with_suffix(".toml")
MODEL = Model(NAME, {CLIP.name: CLIP}, Deployable(NAME, programs), expectations=EXPECTATIONS)
