"""What moves or rotates elements is done where they are read or stored: no pass over memory of its own remains."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional
from tvm import relax
from tvm.relax import op

from conformance.support.kernels import functions_of, hold, lowered
from conformance.support.operators import normal
from harness.compiler.schedules.common.kernel_info import infos_of

pytestmark = pytest.mark.smoke


def kernels_of(operator: object, inputs: list, weights: list = ()) -> list[str]:
    """Names of the functions that run for each call, without numbers."""
    names = functions_of(lowered(operator, inputs, weights))
    return sorted({re.sub(r"\d+$", "", name) for name in names} - {"pack"})


def rotate(x: relax.Expr, cos: relax.Expr, sin: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    """Neighbouring features as real and imaginary part, turned by an angle."""
    pairs = op.reshape(x, (*shape[:-1], shape[-1] // 2, 2))
    re, im = (op.take(pairs, relax.const(n, "int64"), axis=len(shape)) for n in (0, 1))
    turned = [
        op.subtract(op.multiply(re, cos), op.multiply(im, sin)),
        op.add(op.multiply(re, sin), op.multiply(im, cos)),
    ]
    return op.reshape(op.concat([op.expand_dims(part, -1) for part in turned], axis=-1), shape)


def torch_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    re, im = x[..., 0::2], x[..., 1::2]
    return torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).reshape(x.shape)


@pytest.mark.parametrize(("length", "heads", "channels"), [(40, 3, 32), (17, 1, 64), (33, 2, 4)])
def test_slices_and_rotation_are_done_while_attention_reads(length: int, heads: int, channels: int) -> None:
    arrays = [
        normal((2, length, 3, heads, channels), 1),
        normal((length, channels // 2), 2),
        normal((length, channels // 2), 3),
    ]
    shape = (2, heads, length, channels)

    def operator(qkv: relax.Expr, cos: relax.Expr, sin: relax.Expr) -> relax.Expr:
        moved = op.permute_dims(qkv, [2, 0, 3, 1, 4])
        q, k, v = (op.squeeze(op.strided_slice(moved, [0], [n], [n + 1]), 0) for n in range(3))
        q, k = rotate(q, cos, sin, shape), rotate(k, cos, sin, shape)
        return op.permute_dims(op.nn.attention(*(op.permute_dims(x, [0, 2, 1, 3]) for x in (q, k, v))), [0, 2, 1, 3])

    def expected(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return functional.scaled_dot_product_attention(torch_rotate(q, cos, sin), torch_rotate(k, cos, sin), v)

    hold(operator, expected, arrays)
    assert kernels_of(operator, arrays) == ["attention"]


@pytest.mark.parametrize("count", [4, 5])
def test_up_to_four_tensors_are_joined_while_attention_reads(count: int) -> None:
    arrays = [normal((1, 3, 2, 16), seed) for seed in range(count)] + [normal((1, 20, 2, 16), 9)]

    def operator(*tensors: relax.Expr) -> relax.Expr:
        *parts, k = tensors
        return op.nn.attention(op.concat(parts, axis=1), k, k)

    def expected(*tensors: torch.Tensor) -> torch.Tensor:
        *parts, k = (tensor.transpose(1, 2) for tensor in tensors)
        return functional.scaled_dot_product_attention(torch.cat(parts, dim=2), k, k).transpose(1, 2)

    hold(operator, expected, arrays)
    assert (kernels_of(operator, arrays) == ["attention"]) is (count == 4)


@pytest.mark.parametrize(("side", "window", "features", "results"), [(12, 4, 32, 48), (6, 3, 17, 5)])
def test_windows_are_cut_and_joined_by_the_products(side: int, window: int, features: int, results: int) -> None:
    """Partition into windows, linear layer, back to the image, residual: one kernel."""
    count = side // window
    arrays = [normal((1, side, side, features), 1), normal((1, side, side, results), 2)]
    weights = [normal((features, results), 3), normal((results,), 4)]

    def operator(x: relax.Expr, residual: relax.Expr, weight: relax.Expr, bias: relax.Expr) -> relax.Expr:
        cut = op.permute_dims(op.reshape(x, (1, count, window, count, window, features)), [0, 1, 3, 2, 4, 5])
        product = op.add(op.matmul(op.reshape(cut, (side * side, features)), weight), bias)
        joined = op.permute_dims(op.reshape(product, (1, count, count, window, window, results)), [0, 1, 3, 2, 4, 5])
        return op.add(op.reshape(joined, (1, side, side, results)), residual)

    def expected(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x @ weight + bias + residual

    hold(operator, expected, arrays, weights)
    assert kernels_of(operator, arrays, weights) == ["matmul_add_add"]


def test_heads_are_joined_without_a_copy() -> None:
    """Attention writes its result as the product reads it, whose rows are then read where they lie."""
    arrays = [normal((2, 3, 20, 16), seed) for seed in range(3)]
    weights = [normal((48, 24), 4)]

    def operator(q: relax.Expr, k: relax.Expr, v: relax.Expr, weight: relax.Expr) -> relax.Expr:
        result = op.permute_dims(op.nn.attention(*(op.permute_dims(x, [0, 2, 1, 3]) for x in (q, k, v))), [0, 2, 1, 3])
        joined = op.permute_dims(op.reshape(result, (2, 3, 4, 5, 16)), [0, 2, 3, 1, 4])
        return op.matmul(op.reshape(joined, (40, 48)), weight)

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(40, 48) @ weight

    hold(operator, expected, arrays, weights)
    assert kernels_of(operator, arrays, weights) == ["attention", "matmul"]
    narrow = infos_of(lowered(operator, arrays, [normal((48, 8), 5)]))
    assert narrow["matmul"].decisions["read"] == "in place"


def test_columns_that_move_stay_a_pass_of_their_own() -> None:
    """A permutation that tears the rows of a product apart is not done by it, and is right all the same."""
    arrays, weights = [normal((12, 8), 1)], [normal((8, 10), 2)]

    def operator(x: relax.Expr, weight: relax.Expr) -> relax.Expr:
        return op.permute_dims(op.reshape(op.matmul(x, weight), (3, 4, 10)), [2, 0, 1])

    hold(operator, lambda x, weight: (x @ weight).reshape(3, 4, 10).permute(2, 0, 1), arrays, weights)


def test_what_another_operator_needs_too_is_still_computed() -> None:
    """The rotated queries are read by attention and returned as well."""
    arrays = [normal((1, 2, 20, 8), 1), normal((20, 4), 2), normal((20, 4), 3)]

    def operator(x: relax.Expr, cos: relax.Expr, sin: relax.Expr) -> relax.Expr:
        q = op.permute_dims(rotate(x, cos, sin, (1, 2, 20, 8)), [0, 2, 1, 3])
        return op.add(op.nn.attention(q, q, q), q)

    def expected(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = torch_rotate(x, cos, sin)
        return (functional.scaled_dot_product_attention(q, q, q) + q).transpose(1, 2)

    hold(operator, expected, arrays)


@pytest.mark.parametrize(("tokens", "memories", "others"), [(13, 3, 5), (20, 1, 4), (150, 5, 1)])
def test_keys_that_are_rotated_in_part_are_rotated_while_attention_reads(
    tokens: int, memories: int, others: int
) -> None:
    """Keys of some memories are rotated, and keys after them are as they are: a run of keys is replaced."""
    rotated = tokens * memories
    shape = (2, 1, rotated, 64)
    arrays = [
        normal((2, tokens, 1, 64), 1),
        normal((2, 1, rotated + others, 64), 2),
        normal((rotated, 32), 3),
        normal((rotated, 32), 4),
    ]

    def operator(q: relax.Expr, k: relax.Expr, cos: relax.Expr, sin: relax.Expr) -> relax.Expr:
        head = relax.BlockBuilder.current().emit(op.strided_slice(k, [2], [0], [rotated]))
        turned = op.broadcast_to(rotate(head, cos, sin, shape), shape)
        keys = op.permute_dims(op.slice_scatter(k, turned, 0, rotated, 1, axis=2), [0, 2, 1, 3])
        return op.nn.attention(q, keys, op.permute_dims(k, [0, 2, 1, 3]))

    def expected(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([torch_rotate(k[:, :, :rotated], cos, sin), k[:, :, rotated:]], 2)
        return functional.scaled_dot_product_attention(q.transpose(1, 2), keys, k).transpose(1, 2)

    hold(operator, expected, arrays)
    assert kernels_of(operator, arrays) == ["attention"]


@pytest.mark.parametrize(("axis", "start"), [(0, 1), (1, 4), (2, 3)])
def test_a_run_that_is_replaced_along_any_axis(axis: int, start: int) -> None:
    """As the left operand of a product, whose rows it changes or tears apart."""
    shape = (3, 11, 12)
    run = [2 if d == axis else extent for d, extent in enumerate(shape)]
    arrays, weights = [normal(shape, 1), normal(run, 2)], [normal((12, 9), 3)]

    def operator(x: relax.Expr, y: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.matmul(op.slice_scatter(x, y, start, start + 2, 1, axis=axis), w)

    def expected(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.slice_scatter(x, y, axis, start, start + 2) @ w

    hold(operator, expected, arrays, weights)
