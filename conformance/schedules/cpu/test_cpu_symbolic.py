"""Operators with an extent that is not known when they are compiled: right, if by plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional
from tvm import relax, tirx

from conformance.support.kernels import call_of, hold_result, lowered_for, machine_of
from conformance.support.operators import normal

op = relax.op
N = tirx.Var("n", "int64")
"""The unknown extent."""


@dataclass(frozen=True)
class Operation:
    """An operator, PyTorch's, and the shapes of its inputs and weights.

    Attributes:
        operator: On Relax.
        reference: In PyTorch.
        shapes: With the unknown extent.
        inputs: How many of them are inputs.
    """

    operator: Callable[..., relax.Expr]
    reference: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int | tirx.Var, ...], ...]
    inputs: int = 1


OPERATIONS = {
    "linear": Operation(
        lambda x, w, b: op.add(op.matmul(x, op.permute_dims(w)), b),
        functional.linear,
        ((2, N, 64), (48, 64), (48,)),
    ),
    "linear-gelu": Operation(
        lambda x, w, b: op.nn.gelu(op.add(op.matmul(x, op.permute_dims(w)), b)),
        lambda x, w, b: functional.gelu(functional.linear(x, w, b)),
        ((2, N, 64), (48, 64), (48,)),
    ),
    "product": Operation(op.matmul, torch.matmul, ((2, 8, N), (2, N, 16)), 2),
    "conv-1x1": Operation(op.nn.conv2d, functional.conv2d, ((N, 8, 9, 9), (12, 8, 1, 1))),
    "conv-3x3": Operation(
        lambda x, w: op.nn.conv2d(x, w, padding=(1,) * 4),
        lambda x, w: functional.conv2d(x, w, padding=1),
        ((N, 8, 9, 9), (12, 8, 3, 3)),
    ),
    "layer-norm": Operation(
        lambda x, w, b: op.nn.layer_norm(x, w, b, axes=[-1]),
        lambda x, w, b: functional.layer_norm(x, (64,), w, b),
        ((2, N, 64), (64,), (64,)),
    ),
    "softmax": Operation(op.nn.softmax, lambda x: torch.softmax(x, -1), ((2, 5, N),)),
    "exp-sin": Operation(lambda x: op.sin(op.exp(x)), lambda x: torch.sin(torch.exp(x)), ((2, N, 20),)),
    "permutation": Operation(lambda x: op.permute_dims(x, [1, 0, 2]), lambda x: x.permute(1, 0, 2), ((N, 2, 20),)),
    "concatenation": Operation(
        lambda x, y: op.concat([x, y], 1), lambda x, y: torch.cat([x, y], 1), ((2, N, 20), (2, 16, 20)), 2
    ),
    "mean": Operation(lambda x: op.mean(x, [1]), lambda x: x.mean(1), ((2, N, 20),)),
    "attention-queries": Operation(
        op.nn.attention,
        lambda q, k, v: functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(
            1, 2
        ),
        ((2, N, 2, 16), (2, 40, 2, 16), (2, 40, 2, 16)),
        3,
    ),
    "attention-batch": Operation(
        op.nn.attention,
        lambda q, k, v: functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(
            1, 2
        ),
        ((N, 30, 2, 16), (N, 40, 2, 16), (N, 40, 2, 16)),
        3,
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_unknown_extent(operation: Operation) -> None:
    machine = machine_of(lowered_for(operation.operator, operation.shapes, inputs=operation.inputs))
    for extent in (1, 7, 33):
        shapes = [[extent if isinstance(e, tirx.Var) else int(e) for e in shape] for shape in operation.shapes]
        arrays = [normal(shape, seed, scale=0.25 if seed else 1.0) for seed, shape in enumerate(shapes)]
        call = call_of(machine, arrays[operation.inputs :])
        actual = call(*arrays[: operation.inputs])
        assert np.isfinite(actual).all()
        hold_result(actual, operation.reference, arrays)
