"""A small program that is diagnosed with faults put into each layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.schedules.cpu.pipeline import LEGALIZE
from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import SEEDED
from harness.models.sam3.upstream import upstream
from harness.verify.diagnose.diagnosis import Cause, Diagnosis
from harness.verify.diagnose.runner import diagnose_program

WIDTH = 64
SQUARE = (WIDTH, WIDTH)
CASE = Case("block", "real", "llvm")


class Block(nn.Module):
    """Two products with an epilogue each, around a softmax over one of two axes of the same extent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.first(x))
        weights = torch.softmax(hidden, dim=-1)
        mixed = torch.sigmoid(self.second(weights @ hidden))
        return self.last(self.norm(mixed + x)), weights


def block_program() -> Program:
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return Program("block", Block().eval(), {"x": x}, ("mixed", "weights"))


def rotary_program() -> Program:
    """Returns an attention of the image encoder with rotary position encoding, 4 x 4 tokens of 32 channels."""
    with upstream():
        from sam3.model.vitdet import Attention

        torch.manual_seed(0)
        module = Attention(32, 2, use_rope=True, input_size=(4, 4)).eval().requires_grad_(False)
    x = torch.randn(1, 4, 4, 32, generator=torch.Generator().manual_seed(1))
    return Program("attention", module, {"x": x}, ("out",), uses_rope=True)


def block(output: str | None = None, *, reproduce: bool = False) -> Diagnosis:
    return diagnose_program(block_program(), CASE, SEEDED, output, reproduce=reproduce)


def block_in_bf16() -> Diagnosis:
    return diagnose_program(block_program(), replace(CASE, precision="bf16"), SEEDED)


def cause_of(diagnosis: Diagnosis) -> Cause | None:
    """Returns the cause, after the experiments before it were right."""
    assert diagnosis.ablation is not None
    *before, last = diagnosis.ablation.experiments
    assert all(made.result is not None and made.result.excess <= 1 for made in before), diagnosis.ablation
    assert last.decides is diagnosis.ablation.cause
    return diagnosis.ablation.cause


def after_softmax(monkeypatch: pytest.MonkeyPatch, function: tirx.PrimFunc) -> None:
    """Has what softmax becomes call a function with its result."""
    right = LEGALIZE["relax.nn.softmax"]

    def legalized(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        added = builder.add_func(function, "added")
        return builder.emit(relax.call_tir(added, [builder.emit(right(builder, call))], call.ty))

    monkeypatch.setitem(LEGALIZE, "relax.nn.softmax", legalized)


def by_chance() -> tirx.PrimFunc:
    """Returns a function that adds 0 or 1 to each element, other ones each time."""

    def body(x: tirx.Buffer, out: tirx.Buffer) -> None:
        with T.serial(0, WIDTH) as row, T.serial(0, WIDTH) as column:
            added = tirx.Cast("float32", tirx.bitwise_and(T.call_extern("int32", "rand"), 1))
            T.buffer_store(out, x[row, column] + added, [row, column])

    return prim_func("by_chance", [Argument("x", SQUARE), Argument("out", SQUARE)], body)
