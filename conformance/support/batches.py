"""Joins many small programs in one, because exporting, importing and building cost as much for one as for ten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import tvm
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

UNOPTIMIZED = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""What programs are compiled for where it is the importer that is tested: LLVM's passes take most of a build."""

T = TypeVar("T")

Run = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], list[torch.Tensor]]
"""Takes a module and its inputs, returns its outputs as a list."""


@dataclass(frozen=True)
class Part:
    """One of the programs.

    Attributes:
        what: What to name when it goes wrong.
        module: The program.
        inputs: Its inputs.
    """

    what: Any
    module: torch.nn.Module
    inputs: tuple[torch.Tensor, ...]


class Together(torch.nn.Module):
    """Modules side by side: takes the inputs of all, one after the other, and returns the outputs of all."""

    def __init__(self, parts: Sequence[Part], returned: Callable[[int, int], None]) -> None:
        """`returned` is told the number of each part and of its outputs."""
        super().__init__()
        self.parts = torch.nn.ModuleList(part.module for part in parts)
        self.counts = [len(part.inputs) for part in parts]
        self.returned = returned

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, results = list(inputs), []
        for number, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            results.append(listed(part(*left[:count])))
            self.returned(number, len(results[-1]))
            del left[:count]
        return tuple(output for outputs in results for output in outputs)


def listed(outputs: Any) -> list[torch.Tensor]:
    """Returns a module's outputs as a list."""
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def run_together(run: Run, parts: Sequence[Part]) -> list[list[torch.Tensor]]:
    """Returns the outputs of every part, all of them from one run; if that fails, names the part that fails alone."""
    counts = [0] * len(parts)
    together = Together(parts, counts.__setitem__)
    try:
        outputs = run(together, tuple(x for part in parts for x in part.inputs))
    except Exception:
        for part in parts:
            try:
                run(part.module, part.inputs)
            except Exception as error:
                error.add_note(f"in {part.what}")
                raise
        raise
    assert len(outputs) == sum(counts)
    return [[outputs.pop(0) for _ in range(count)] for count in counts]


def drawn(source: st.SearchStrategy[T], count: int) -> list[T]:
    """Returns the first examples that hypothesis draws, the simplest one among them."""
    found: list[T] = []

    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(source)
    def keep(example: T) -> None:
        found.append(example)

    keep()
    return found
