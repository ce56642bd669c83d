"""A strategy that computes another rotation than the model is found and named, as every wrong output is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tvm import te, tirx

from conformance.support.diagnosed import rotary_program
from harness.compiler.lowering.frontends.torch_export.complex import arithmetic
from harness.compiler.lowering.rope import real
from harness.compiler.lowering.rope.operators import position_maps
from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import SEEDED
from harness.models.sam3.upstream import upstream
from harness.verify.diagnose.diagnosis import Cause, Diagnosis
from harness.verify.diagnose.report import summary
from harness.verify.diagnose.runner import diagnose_program


def attention(strategy: str) -> Diagnosis:
    """Diagnoses rotary attention of the image encoder."""
    with upstream():
        return diagnose_program(rotary_program(), Case("attention", strategy, "llvm"), SEEDED)


def late(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    moved = table.roll(1, 0)
    return moved.real.clone(), moved.imag.clone()


def other_way(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    return ROTATE(x, cos, -sin, repeat)


ROTATE: Callable[..., torch.Tensor] = real.rotate


def by_the_conjugate(writer: Any, a: Any, b: Any, multiply: Any = arithmetic._aten.mul.Tensor) -> Any:
    return PRODUCT(writer, a, replace(b, im=writer.call(arithmetic._aten.neg.default, b.im)), multiply)


PRODUCT = arithmetic._product


@pytest.mark.parametrize("strategy", ["real", "lowering"])
def test_a_right_strategy_is_upstreams(strategy: str) -> None:
    found = attention(strategy)
    assert not found.faulty
    assert (found.failed, found.rewriting) == ({}, None)


@pytest.mark.parametrize(("name", "fault"), [("real_tables", late), ("rotate", other_way)])
def test_a_strategy_fault_is_named_with_the_line_of_the_model_and_of_the_strategy(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    monkeypatch.setattr(real, name, fault)
    found = attention("real")
    assert found.faulty
    assert found.first is None, "the kernels are right"
    assert list(found.failed) == found.wrong_outputs == ["out"]
    assert found.rewriting is not None
    assert found.rewriting.cause is Cause.STRATEGY
    assert "sam3/model/vitdet.py" in found.rewriting.source
    assert "self._apply_rope(q, k)" in found.rewriting.source
    assert "rope/real.py" in found.rewriting.by
    assert "Cause: strategy: " in summary(found)


def test_a_strategy_fault_of_the_general_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "_product", by_the_conjugate)
    found = attention("lowering")
    assert found.faulty
    assert found.rewriting is not None
    assert found.rewriting.cause is Cause.STRATEGY
    assert "rope/lowering.py" in found.rewriting.by
    assert "self._apply_rope(q, k)" in found.rewriting.source


def sine_for_cosine(x: Any, positions: Any, table: Any) -> Any:
    return COMPUTE(x, positions, te.compute(table.shape, lambda i, j, part: table[i, j, 1 - part]))


def other_each_time(x: Any, positions: Any, table: Any) -> Any:
    rotated = COMPUTE(x, positions, table)

    def element(*at: Any) -> Any:
        return rotated[at] + tirx.Cast("float32", tirx.bitwise_and(tirx.call_extern("int32", "rand"), 1))

    return te.compute(x.shape, element)


COMPUTE = position_maps._compute


@pytest.mark.parametrize("fault", [sine_for_cosine, other_each_time])
def test_a_fault_of_what_a_strategy_imports_is_the_strategys(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """Nor is it blamed on what comes after, if the operators are wrong in another way each time."""
    monkeypatch.setattr(position_maps, "_compute", fault)
    found = attention("llm")
    assert found.faulty and found.first is not None and found.ablation is not None
    assert "rotate_with_position_map" in found.first.boundary.operators
    assert found.ablation.cause is Cause.STRATEGY, found.ablation.reason


class ShortWhileTraced(torch.nn.Module):
    """Something else while it is traced, as a patch may make of a model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x.softmax(-1)
        short = torch.sigmoid(scaled) if torch.compiler.is_compiling() else torch.tanh(scaled)
        return torch.exp(short)


def test_a_fault_of_the_export_is_not_the_strategys_and_is_named_with_the_line_of_the_model() -> None:
    program = Program("traced", ShortWhileTraced().eval(), {"x": torch.randn(8, 8)}, ("out",))
    found = diagnose_program(program, Case("traced", "real", "llvm"), SEEDED)
    assert found.faulty
    assert found.rewriting is not None
    assert found.rewriting.cause is Cause.EXPORT
    assert "torch.sigmoid(scaled)" in found.rewriting.source
    assert "torch.sigmoid(scaled)" in summary(found)


class Unstable(torch.nn.Module):
    """A model that PyTorch computes otherwise each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.tanh(x)
        self.calls += 1
        return torch.tanh(x) * (1 + 1e-3 * (self.calls % 2))


def test_an_output_that_a_verification_refuses_is_never_excused() -> None:
    program = Program("unstable", Unstable().eval(), {"x": torch.randn(8, 8)}, ("out",))
    found = diagnose_program(program, Case("unstable", "real", "llvm"), SEEDED)
    assert found.faulty
    assert "differs from its own second run" in summary(found)
