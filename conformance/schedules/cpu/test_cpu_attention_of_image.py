"""Attention whose bias is a sum over the lines and the columns of an image: as SAM 3's decoder writes it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from conformance.support.attention import attention, kernels, operands, reference
from conformance.support.examples import examples
from conformance.support.kernels import functions_of, hold, lowered, run
from conformance.support.operators import normal

op = relax.op
ADDED_UP = "added up from the lines and columns of an image"


ZEROS: dict[str, Callable[[list[int]], relax.Expr]] = {
    "full": lambda shape: op.full(shape, relax.const(0.0, "float32"), "float32"),
    "full_like": lambda shape: op.full_like(op.ones(shape, "float32"), relax.const(0.0, "float32")),
    "zeros": lambda shape: op.zeros(shape, "float32"),
    "zeros_like": lambda shape: op.zeros_like(op.ones(shape, "float32")),
}
"""How an importer may write the row of zeros."""


def written_out(
    lines: relax.Expr, columns: relax.Expr, presence: bool, zero: Callable[[list[int]], relax.Expr] = ZEROS["full"]
) -> relax.Expr:
    """The bias of [1, queries, height, heads] and [1, queries, width, heads], with a row of zeros for a first query."""
    _, queries, height, heads = (int(extent) for extent in lines.ty.shape)
    width = int(columns.ty.shape[2])
    bias = op.add(op.expand_dims(lines, 3), op.expand_dims(columns, 2))
    bias = op.permute_dims(op.reshape(bias, [1, queries, height * width, heads]), [0, 3, 1, 2])
    bias = op.reshape(bias, [heads, queries, height * width])
    if presence:
        zeros = zero([heads, 1, height * width])
        bias = op.concat([zeros, bias], axis=1)
    return op.reshape(bias, [1, heads, queries + presence, height * width])


def torch_written_out(lines: torch.Tensor, columns: torch.Tensor, presence: bool) -> torch.Tensor:
    bias = (lines.unsqueeze(3) + columns.unsqueeze(2)).flatten(2, 3).permute(0, 3, 1, 2)
    return torch.cat([torch.zeros_like(bias[:, :, :1]), bias], 2) if presence else bias


def operator(presence: bool) -> Callable[..., relax.Expr]:
    return lambda q, k, v, lines, columns: attention()(q, k, v, written_out(lines, columns, presence))


def arrays(queries: int, height: int, width: int, heads: int, presence: bool) -> list[np.ndarray]:
    return [
        *operands(1, queries + presence, height * width, heads, 32),
        normal((1, queries, height, heads), 3),
        normal((1, queries, width, heads), 4),
    ]


@examples(10)
@given(
    queries=st.sampled_from([17, 40, 100, 201]),
    height=st.sampled_from([16, 24]),
    width=st.sampled_from([16, 31, 72]),
    heads=st.integers(1, 3),
    presence=st.booleans(),
)
def test_any_image(queries: int, height: int, width: int, heads: int, presence: bool) -> None:
    inputs = arrays(queries, height, width, heads, presence)
    hold(
        operator(presence),
        lambda q, k, v, lines, columns: reference()(q, k, v, torch_written_out(lines, columns, presence)),
        inputs,
    )
    module = lowered(operator(presence), inputs)
    (info,) = kernels(module)
    assert info.decisions["bias"] == ADDED_UP
    assert functions_of(module) == ["attention"]


@pytest.mark.parametrize("presence", [False, True])
def test_every_bit_is_that_of_the_bias_written_out(presence: bool) -> None:
    inputs = arrays(100, 24, 72, 2, presence)
    bias = torch_written_out(*map(torch.from_numpy, inputs[3:]), presence).contiguous().numpy()
    np.testing.assert_array_equal(run(operator(presence), inputs), run(attention(), [*inputs[:3], bias]))


def test_zeros_however_they_are_written() -> None:
    inputs = arrays(40, 16, 31, 2, presence=True)
    expected = run(operator(presence=True), inputs)
    for name, zero in ZEROS.items():

        def whole(*operands: relax.Expr, zero: Callable[[list[int]], relax.Expr] = zero) -> relax.Expr:
            return attention()(*operands[:3], written_out(*operands[3:], True, zero))

        (info,) = kernels(lowered(whole, inputs))
        assert info.decisions["bias"] == ADDED_UP, name
        np.testing.assert_array_equal(run(whole, inputs), expected, name)


def of_other_zeros(lines: relax.Expr, columns: relax.Expr) -> relax.Expr:
    """A first query that has ones."""
    ones = op.full([1, 2, 1, 24 * 72], relax.const(1.0, "float32"), "float32")
    return op.concat([ones, written_out(lines, columns, presence=False)], axis=2)


def of_a_product(lines: relax.Expr, columns: relax.Expr) -> relax.Expr:
    """What is multiplied afterwards is no sum."""
    return op.multiply(written_out(lines, columns, presence=True), relax.const(2.0, "float32"))


def of_whole_images(lines: relax.Expr, columns: relax.Expr) -> relax.Expr:
    """A sum of two biases that both depend on the whole key."""
    whole = written_out(lines, columns, presence=True)
    return op.add(whole, op.nn.relu(whole))


def with_ones(bias: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.ones_like(bias[:, :, :1]), bias[:, :, 1:]], 2)


@pytest.mark.parametrize(
    ("bias", "torch_bias"),
    [
        (of_other_zeros, with_ones),
        (of_a_product, lambda bias: 2 * bias),
        (of_whole_images, lambda bias: bias + bias.relu()),
    ],
    ids=["ones", "product", "whole images"],
)
def test_what_looks_like_it_is_read_as_it_is_written_out(
    bias: Callable[..., relax.Expr], torch_bias: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    inputs = arrays(100, 24, 72, 2, presence=True)

    def whole(q: relax.Expr, k: relax.Expr, v: relax.Expr, lines: relax.Expr, columns: relax.Expr) -> relax.Expr:
        return attention()(q, k, v, bias(lines, columns))

    hold(
        whole,
        lambda q, k, v, lines, columns: reference()(q, k, v, torch_bias(torch_written_out(lines, columns, True))),
        inputs,
    )
    (info,) = kernels(lowered(whole, inputs))
    assert "bias" not in info.decisions


def test_parts_that_depend_on_weights_alone_are_kept_instead_of_the_bias() -> None:
    inputs = arrays(100, 24, 72, 2, presence=True)
    module = lowered(operator(presence=True), inputs[:3], inputs[3:])
    (info,) = kernels(module)
    assert info.decisions["bias"] == ADDED_UP
    np.testing.assert_array_equal(
        run(operator(presence=True), inputs[:3], inputs[3:]), run(operator(presence=True), inputs)
    )
    kept = module["main_transform_params"].ret_ty.fields
    assert sum(math.prod(int(extent) for extent in tensor.shape) for tensor in kept) == inputs[3].size + inputs[4].size


def test_a_short_image_is_read_as_it_is_written_out() -> None:
    """Each number would be read a few times alone."""
    inputs = arrays(40, 8, 8, 2, presence=False)
    (info,) = kernels(lowered(operator(presence=False), inputs))
    assert "bias" not in info.decisions
