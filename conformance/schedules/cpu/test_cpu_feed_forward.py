"""Two linear layers in one kernel: every bit as by themselves, in less memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import tvm
from torch.nn import functional
from tvm import relax

from conformance.support.cpus import narrower
from conformance.support.kernels import functions_of, hold, hold_result, lowered, lowered_for, run
from conformance.support.operators import normal
from harness.compiler.schedules.common.kernel_info import FEED_FORWARD, infos_of

op = relax.op
MEGABYTE = 1024 * 1024
NARROW, WIDE = 256, 2048
SHAPES = ((WIDE, NARROW), (WIDE,), (NARROW, WIDE), (NARROW,))
"""Weights and biases of both layers."""


def hidden_layer(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.nn.relu(op.add(op.matmul(x, op.permute_dims(w)), b))


def last_layer(hidden: relax.Expr, x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.add(x, op.add(op.matmul(hidden, op.permute_dims(w)), b))


def block(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
    return last_layer(hidden_layer(x, w1, b1), x, w2, b2)


def read_twice(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
    hidden = hidden_layer(x, w1, b1)
    return op.add(last_layer(hidden, x, w2, b2), op.max(hidden, [-1], keepdims=True))


def reference(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor) -> torch.Tensor:
    return x + functional.linear(functional.relu(functional.linear(x, w1, b1)), w2, b2)


@pytest.mark.parametrize("cpu", [None, *narrower()])
@pytest.mark.parametrize("rows", [5184, 4111])
def test_every_bit_is_that_of_two_products(rows: int, cpu: str | None) -> None:
    """Also where neither the last block nor the last tile of rows is full."""
    target = None if cpu is None else tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    x = normal((1, rows, NARROW))
    w1, b1, w2, b2 = (normal(shape, seed, 0.05) for seed, shape in enumerate(SHAPES, 1))
    joined = run(block, [x], [w1, b1, w2, b2], target)
    hidden = run(hidden_layer, [x], [w1, b1], target)
    np.testing.assert_array_equal(joined, run(last_layer, [hidden, x], [w2, b2], target))
    hold_result(joined, reference, [x, w1, b1, w2, b2])


@pytest.mark.parametrize("cpu", [None, *narrower()])
def test_a_thin_network_with_a_smaller_hidden_layer_is_one_kernel(cpu: str | None) -> None:
    """As where SAM 3's decoder makes numbers of distances: its time is that of the hidden layer in memory."""
    target = None if cpu is None else tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    x, weights = normal((1, 14401, 2)), [normal((256, 2), 1), normal((256,), 2), normal((8, 256), 3), normal((8,), 4)]

    def network(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
        return op.add(op.matmul(hidden_layer(x, w1, b1), op.permute_dims(w2)), b2)

    assert any(info.algorithm == FEED_FORWARD for info in infos_of(lowered(network, [x], weights, target)).values())
    joined = run(network, [x], weights, target)
    hidden = run(hidden_layer, [x], weights[:2], target)
    second = run(lambda h, w, b: op.add(op.matmul(h, op.permute_dims(w)), b), [hidden], weights[2:], target)
    np.testing.assert_array_equal(joined, second)


@pytest.mark.smoke
def test_the_hidden_layer_is_never_whole() -> None:
    module = lowered_for(block, [(1, 5184, NARROW), *SHAPES], inputs=1)
    (info,) = (info for info in infos_of(module).values() if info.algorithm == FEED_FORWARD)
    assert info.writes == ("add", "nn.relu", "matmul", "add", "add")
    assert info.flop == 2 * 2 * 5184 * NARROW * WIDE
    assert 0 < int(info.decisions["rows at a time"]) * WIDE * 4 <= MEGABYTE
    allocated = re.findall(r"alloc_storage\(R\.shape\(\[(\d+)\]\)", module["main"].script())
    assert sum(map(int, allocated)) == 4 * 5184 * NARROW, "the result"


def rows_moved(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
    hidden = op.permute_dims(hidden_layer(x, w1, b1), [1, 0, 2])
    return last_layer(hidden, x, w2, b2)


def rows_read_elsewhere(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
    """The second layer reads the rows where they were, because no epilogue takes a new dimension."""
    hidden = op.permute_dims(op.expand_dims(hidden_layer(x, w1, b1), [0]), [0, 2, 1, 3])
    return last_layer(op.squeeze(hidden, [0]), x, w2, b2)


@pytest.mark.parametrize("operator", [rows_moved, rows_read_elsewhere])
def test_rows_that_move_between_the_layers_are_not_lost(operator) -> None:
    x = normal((72, 72, NARROW))
    weights = [normal(shape, seed, 0.05) for seed, shape in enumerate(SHAPES, 1)]

    def moved(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, *last: torch.Tensor) -> torch.Tensor:
        return x + functional.linear(functional.relu(functional.linear(x, w1, b1)).transpose(0, 1), *last)

    hold(operator, moved, [x], weights)


def test_dimensions_of_one_between_the_layers_are_nothing() -> None:
    def unsqueezed(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
        hidden = op.expand_dims(hidden_layer(x, w1, b1), [0])
        return last_layer(hidden, x, w2, b2)

    x = normal((5184, NARROW))
    weights = [normal(shape, seed, 0.05) for seed, shape in enumerate(SHAPES, 1)]
    hold(unsqueezed, lambda *arrays: reference(*arrays)[None], [x], weights)
    assert any(info.algorithm == FEED_FORWARD for info in infos_of(lowered(unsqueezed, [x], weights)).values())


@pytest.mark.parametrize(
    ("operator", "rows", "narrow"),
    [(read_twice, 5184, NARROW), (block, 512, NARROW), (block, 5184, 2 * NARROW)],
    ids=["hidden layer read twice", "few rows", "large weights"],
)
def test_layers_that_stay_two_products(operator, rows: int, narrow: int) -> None:
    shapes = [(1, rows, narrow), (WIDE, narrow), (WIDE,), (narrow, WIDE), (narrow,)]
    names = functions_of(lowered_for(operator, shapes, inputs=1))
    assert not any("feed_forward" in name for name in names) and sum("matmul" in name for name in names) == 2
