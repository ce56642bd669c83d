"""Two linear layers in one kernel: every bit as by themselves, in less memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from tvm import relax

from conformance.support.cpus import CPUS
from conformance.support.kernels import hold_result, lowered, run
from conformance.support.operators import normal
from harness.schedules.common.kernel_info import FEED_FORWARD, infos_of
from harness.targets import TARGETS

op = relax.op
MEGABYTE = 1024 * 1024


def hidden_layer(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.nn.relu(op.add(op.matmul(x, op.permute_dims(w)), b))


def last_layer(hidden: relax.Expr, x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.add(x, op.add(op.matmul(hidden, op.permute_dims(w)), b))


def block(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
    return last_layer(hidden_layer(x, w1, b1), x, w2, b2)


def read_twice(x: relax.Expr, w1: relax.Expr, b1: relax.Expr, w2: relax.Expr, b2: relax.Expr) -> relax.Expr:
    hidden = hidden_layer(x, w1, b1)
    return op.add(last_layer(hidden, x, w2, b2), op.sum(hidden, [-1], keepdims=True))


def arrays(rows: int, narrow: int = 256, wide: int = 2048) -> list[np.ndarray]:
    """Input, and weights and biases of both layers."""
    shapes = [(1, rows, narrow), (wide, narrow), (wide,), (narrow, wide), (narrow,)]
    return [normal(shape, seed, 1.0 if len(shape) == 3 else 0.05) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("rows", [5184, 4111])
@pytest.mark.parametrize("cpu", [None, "haswell"])
def test_every_bit_is_that_of_two_products(rows: int, cpu: str | None) -> None:
    """Also where the last block and the last tile of rows are not full."""
    target = None if cpu is None else narrower_target(cpu)
    x, w1, b1, w2, b2 = arrays(rows)
    joined = run(block, [x], [w1, b1, w2, b2], target)
    hidden = run(hidden_layer, [x], [w1, b1], target)
    np.testing.assert_array_equal(joined, run(last_layer, [hidden, x], [w2, b2], target))
