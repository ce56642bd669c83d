"""What the benchmarks of the strategies report: which kernels, how many bytes, what is shared, which numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import tvm

from harness.compiler.lowering.rope import STRATEGIES
from harness.models.sam3.upstream import upstream
from perf.rope import UNROTATED, Pool, Rotate, RotateAndAttend, compiled
from perf.tables import rope_tables
from perf.test_rope import PYTORCH, over

TOKENS = tuple(torch.randn((1, 2, 15, 64), generator=torch.Generator().manual_seed(n)) for n in range(3))
BYTES = TOKENS[0].nbytes
TABLES = 2 * 15 * 32 * 4
"""Cosines and sines of 15 positions and 32 pairs."""


@pytest.fixture(scope="module")
def rotate() -> Any:
    with upstream():
        yield Rotate(5, 3, 1.0).eval()


@pytest.fixture(scope="module")
def attend() -> Any:
    with upstream():
        yield RotateAndAttend(5, 3, 1.0).eval()


def test_one_kernel_reads_and_writes_everything_once(rotate: torch.nn.Module) -> None:
    result = compiled(STRATEGIES["tensorir"], rotate, TOKENS[:2], Pool())
    assert (result.kernels, result.moved) == (1, 4 * BYTES + TABLES)
    for actual, expected in zip(result.call(), rotate(*TOKENS[:2]), strict=True):
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)


def test_a_rotation_that_attention_folds_adds_its_tables(attend: torch.nn.Module) -> None:
    pool = Pool()
    folded, unrotated = (compiled(s, attend, TOKENS, pool) for s in (STRATEGIES["tensorir"], UNROTATED))
    assert (unrotated.kernels, unrotated.moved) == (1, 4 * BYTES)
    assert (folded.kernels, folded.moved) == (1, 4 * BYTES + TABLES)


def test_without_rotation_queries_and_keys_are_as_they_were(attend: torch.nn.Module) -> None:
    q, k, v = TOKENS
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with torch.no_grad(), UNROTATED.apply(attend):
        assert torch.equal(attend(q, k, v), plain)
    assert not torch.allclose(attend(q, k, v), plain)
    (actual,) = compiled(UNROTATED, attend, TOKENS, Pool()).call()
    np.testing.assert_allclose(actual.numpy(), plain.numpy(), rtol=1e-5, atol=1e-5)


def test_equal_parameters_are_in_memory_once() -> None:
    pool = Pool()
    first = pool.shared(tvm.runtime.tensor(np.arange(6, dtype="float32")))
    assert pool.shared(tvm.runtime.tensor(np.arange(6, dtype="float32"))) is first
    for other in (np.arange(1, 7, dtype="float32"), np.arange(6, dtype="float32").reshape(2, 3), np.zeros(6, "int32")):
        assert pool.shared(tvm.runtime.tensor(other)) is not first
    scalar = pool.shared(tvm.runtime.tensor(np.array(1.0, "float32")))
    assert pool.shared(tvm.runtime.tensor(np.array(1.0, "float32"))) is scalar


def test_what_a_rotation_adds() -> None:
    assert over([2.0, 4.0, 3.0], None) is None
    added = over([2.2, 4.4, 2.4], [2.0, 2.0, 2.0])
    assert added == pytest.approx({"medians": 0.2, "least": 0.1, "most": 1.2})


def test_the_table_has_a_line_for_each_side() -> None:
    common = {"workload": "rotation", "threads": 2}
    added = {"medians": 0.015, "least": -0.01, "most": 0.02}
    sides = [
        {"side": PYTORCH, "seconds": [0.2], "torch_over_side": 1.0, "over_unrotated": None, "kernels": None},
        {"side": "real", "seconds": [0.1, 0.08], "torch_over_side": 2.0, "over_unrotated": added, "kernels": 3},
    ]
    text = rope_tables([side | common | {"moved": 5e6} for side in sides])
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert lines[PYTORCH][2:] == ["200", "200–200", "1.00", "n/a", "n/a", "n/a", "n/a"]
    assert lines["real"] == ["real", "90.0", "80.0–100", "2.00", "+1.5%", "-1.0%–+2.0%", "3", "5.0"]
    assert "on 2 threads" in text
