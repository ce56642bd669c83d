"""Defines a model from outside the package that segments frame after frame and remembers, with complex RoPE inside.

PyTorch is imported when the model is opened, because every command imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.compiler.deployment.deployable import Deployable
from harness.core.case import Case
from harness.core.program import Call, Output, Program
from harness.core.settings import Settings
from harness.models.model import Model
from harness.models.subject import Subject, Workload
from harness.models.traced import open_trace

NAME, FRAMES, TOKENS, CHANNELS = "recurrent", 3, 12, 16


def programs(case: Case, _settings: Settings, _options: object = None) -> Iterator[Program]:
    import torch

    from conformance.support.recurrent_step import Step

    example = {"frame": torch.zeros(TOKENS, CHANNELS), "memory": torch.zeros(TOKENS, CHANNELS)}
    yield Program("step", Step(case.seed).eval().requires_grad_(False), example, ("logits", "memory"), uses_rope=True)


def open_clip(case: Case, settings: Settings) -> Workload:
    import torch

    (step,) = programs(case, settings)
    clip = torch.randn(FRAMES + 1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1))
    states = [clip[FRAMES], *(Output(str(number), "memory") for number in range(FRAMES - 1))]
    trace = [Call(str(n), step.name, (clip[n], state), f"frame_{n}/") for n, state in enumerate(states)]
    return open_trace(case, {step.name: step}, trace)


OUTPUTS = ("logits", "memory")
CLIP = Subject("clip", "three frames and a memory", ("frames",), OUTPUTS, open_clip, NAME, uses_rope=True)
EXPECTATIONS = Path(__file__).with_suffix(".toml")
MODEL = Model(NAME, {CLIP.name: CLIP}, Deployable(NAME, programs), expectations=EXPECTATIONS)
