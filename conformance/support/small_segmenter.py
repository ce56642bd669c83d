"""A model from outside the package whose outputs are of every kind that a report draws: features, masks, boxes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.core.case import Case
from harness.core.program import Call, Program
from harness.core.settings import Settings
from harness.models.model import Model
from harness.models.subject import Subject, Workload
from harness.models.traced import open_trace

NAME, SIDE, WIDTH, CHANNELS, MASKS = "small_segmenter", 40, 120, 16, 4
OUTPUTS = ("features", "pred_masks", "boxes", "mask")


class Segmenter(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(CHANNELS, 64)
        self.segment = torch.nn.Linear(64, MASKS)
        self.box = torch.nn.Linear(64, 4)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pixels [SIDE * WIDTH, CHANNELS] to square features, masks of a photograph, a box, and where a mask is."""
        hidden = torch.relu(self.first(pixels))
        masks = self.segment(hidden).T.reshape(1, MASKS, SIDE, WIDTH)
        features = hidden[: SIDE * SIDE].T.reshape(1, 64, SIDE, SIDE)
        return features, masks, self.box(hidden[:8]).sigmoid(), masks[:, 0] > 0.5


def program(seed: int) -> Program:
    pixels = torch.randn(SIDE * WIDTH, CHANNELS, generator=torch.Generator().manual_seed(1))
    module = Segmenter(seed).eval().requires_grad_(False)
    return Program("segment", module, {"pixels": pixels}, OUTPUTS)


def programs(case: Case, _settings: Settings, _options: object = None) -> Iterator[Program]:
    yield program(case.seed)


def open_photograph(case: Case, _settings: Settings) -> Workload:
    built = program(case.seed)
    return open_trace(case, {built.name: built}, [Call("only", built.name, tuple(built.example.values()))])


PHOTOGRAPH = Subject("photograph", "one photograph", ("pixels",), OUTPUTS, open_photograph, NAME)
MODEL = Model(NAME, {PHOTOGRAPH.name: PHOTOGRAPH})
