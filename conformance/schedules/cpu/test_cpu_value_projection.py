"""Attention to values that are a linear layer of something narrower: the layer follows the attention instead."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax, tirx

from conformance.support.attention import kernels
from conformance.support.examples import examples
from conformance.support.kernels import call_of, functions_of, hold, hold_result, lowered, lowered_for, machine_of
from conformance.support.operators import normal
from conformance.support.place import cpu_target
from harness.compiler.schedules.common.kernel_info import infos_of
from harness.compiler.schedules.common.provenance import LoweringKind, Operator, trace
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.schedules.cpu.rewrite import workloads

op = relax.op


def tensors(
    queries: int, keys: int, narrow: int, wide: int, batch: int = 1, heads: int = 1, channels: int = 32
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Queries, keys and what values are a layer of, each [batch, length, channel]; weight and bias of the layer."""
    inputs = [
        normal((batch, queries, heads * channels), 0),
        normal((batch, keys, heads * channels), 1),
        normal((batch, keys, narrow), 2),
    ]
    return inputs, [normal((heads * wide, narrow), 3, scale=narrow**-0.5), normal((heads * wide,), 4)]


def emitted(value: relax.Expr) -> relax.Var:
    """The value as a variable, whose shape is known."""
    return relax.BlockBuilder.current().emit(value)


def split(x: relax.Expr, heads: int = 1, first: bool = True) -> relax.Expr:
    """[batch, length, head · channel] → [batch, length, head, channel], as PyTorch's attention is imported."""
    x = emitted(x)
    batch, length, channels = x.ty.shape
    x = op.reshape(x, [batch, length, heads, int(channels) // heads])
    return op.permute_dims(op.permute_dims(x, [0, 2, 1, 3]), [0, 2, 1, 3]) if first else x


def joined(x: relax.Expr) -> relax.Expr:
    """The result of an attention with its heads side by side again."""
    x = emitted(x)
    batch, length, heads, channels = (int(extent) for extent in x.ty.shape)
    x = op.permute_dims(op.permute_dims(x, [0, 2, 1, 3]), [0, 2, 1, 3])
    return op.reshape(x, [batch, length, heads * channels])


def linear(x: relax.Expr, weight: relax.Expr, bias: relax.Expr | None = None) -> relax.Expr:
    product = op.matmul(x, op.permute_dims(weight))
    return product if bias is None else op.add(product, bias)


def layer(
    heads: int = 1, first: bool = True, causal: str | None = None, swapped: bool = False
) -> Callable[..., relax.Expr]:
    """Attention with projected values, of the five tensors or without the bias of the layer."""

    def operator(q: relax.Expr, k: relax.Expr, x: relax.Expr, w: relax.Expr, b: relax.Expr | None = None) -> relax.Expr:
        values = op.add(b, op.matmul(x, op.permute_dims(w))) if swapped and b is not None else linear(x, w, b)
        parts = (split(part, heads, first) for part in (q, k, values))
        return joined(op.nn.attention(*parts, None, None, causal))

    return operator


def reference(heads: int = 1, causal: bool = False) -> Callable[..., torch.Tensor]:
    def compute(
        q: torch.Tensor, k: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None
    ) -> torch.Tensor:
        parts = [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, functional.linear(x, w, b))]
        return functional.scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2).flatten(2)

    return compute


def projected(module: tvm.IRModule) -> bool:
    (info,) = kernels(module)
    return info.decisions.get("values") == "projected afterwards"


@examples(10)
@given(
    batch=st.integers(1, 2),
    queries=st.sampled_from([1, 3, 12, 50, 97]),
    keys=st.sampled_from([64, 300, 577, 1500]),
    widths=st.sampled_from([(8, 32), (1, 20), (16, 17), (24, 64), (5, 96)]),
    biased=st.booleans(),
    first=st.booleans(),
    swapped=st.booleans(),
)
def test_the_projection_follows(
    batch: int, queries: int, keys: int, widths: tuple[int, int], biased: bool, first: bool, swapped: bool
) -> None:
    """Few queries, keys that each task copies, and keys that come a block at a time."""
    inputs, weights = tensors(queries, keys, *widths, batch=batch)
    weights = weights if biased else weights[:1]
    operator = layer(first=first, swapped=swapped)
    hold(operator, reference(), inputs, weights)
    module = lowered(operator, inputs, weights)
    narrow, wide = widths
    assert projected(module) == (keys * (wide - narrow) > narrow * wide)
    if projected(module):
        assert kernels(module)[0].extents["width"] == narrow
        assert [name.rstrip("0123456789") for name in functions_of(module)] == [
            "attention",
            "matmul_add" if biased else "matmul",
            "pack",
        ]


@pytest.mark.parametrize("keys", [576, 36352 + 64])
def test_the_errors_are_no_larger_than_pytorchs(keys: int) -> None:
    inputs, weights = tensors(48, keys, 64, 256, channels=256)
    hold(layer(), reference(), inputs, weights, large=True)


def test_what_follows_the_projection_is_done_as_it_is_stored() -> None:
    """An output projection with a residual; the products are all that is left besides attention."""
    inputs, weights = tensors(50, 600, 16, 64, channels=64)
    out = [normal((64, 64), 5, scale=0.125), normal((64,), 6)]

    def operator(q: relax.Expr, k: relax.Expr, x: relax.Expr, *parameters: relax.Expr) -> relax.Expr:
        return op.add(q, linear(layer()(q, k, x, *parameters[:2]), *parameters[2:]))

    def expected(q: torch.Tensor, k: torch.Tensor, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return q + functional.linear(reference()(q, k, x, *parameters[:2]), *parameters[2:])

    hold(operator, expected, inputs, [*weights, *out])
    module = lowered(operator, inputs, [*weights, *out])
    assert projected(module)
    assert {name.rstrip("0123456789") for name in functions_of(module)} == {
        "attention",
        "matmul_add",
        "matmul_add_add",
        "pack",
    }


def test_a_weight_that_was_expanded_to_a_batch() -> None:
    """As PyTorch exports a linear layer of a strided input."""
    inputs, weights = tensors(50, 600, 16, 64, batch=2)

    def operator(q: relax.Expr, k: relax.Expr, x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        values = op.add(op.matmul(x, op.broadcast_to(op.permute_dims(w), [2, 16, 64])), b)
        return joined(op.nn.attention(*(split(part) for part in (q, k, values))))

    hold(operator, reference(), inputs, weights)
    assert projected(lowered(operator, inputs, weights))


def test_tokens_may_come_before_objects() -> None:
    """[length, batch, channel], as memories are kept: the permutation before the layer is read through as well."""
    inputs, weights = tensors(50, 700, 16, 64, batch=3)
    inputs[2] = np.ascontiguousarray(inputs[2].transpose(1, 0, 2))

    def operator(q: relax.Expr, k: relax.Expr, x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return layer()(q, k, op.permute_dims(x, [1, 0, 2]), w, b)

    hold(operator, lambda q, k, x, w, b: reference()(q, k, x.transpose(0, 1), w, b), inputs, weights)
    module = lowered(operator, inputs, weights)
    assert projected(module)
    assert [name.rstrip("0123456789") for name in functions_of(module)] == ["attention", "matmul_add", "pack"]


def test_any_number_of_keys() -> None:
    n = tirx.Var("n", "int64")
    inputs, weights = tensors(50, 1, 16, 64, batch=2)
    shapes = [(2, 50, 32), (2, n, 32), (2, n, 16), (64, 16), (64,)]
    module = lowered_for(layer(), shapes, inputs=3)
    assert projected(module)
    call = call_of(machine_of(module), weights)
    for keys in (1, 17, 1201):
        inputs, _ = tensors(50, keys, 16, 64, batch=2)
        hold_result(call(*inputs), reference(), [*inputs, *weights])


# --- where it is not done ---


def test_not_with_a_mask() -> None:
    """A query without keys gives zero, and not the bias of the layer."""
    inputs, weights = tensors(20, 300, 8, 32)
    mask = np.zeros((1, 1, 20, 300), np.float32)
    mask[:, :, 7] = -np.inf

    def operator(q: relax.Expr, k: relax.Expr, x: relax.Expr, m: relax.Expr, *parameters: relax.Expr) -> relax.Expr:
        parts = [split(part) for part in (q, k, linear(x, *parameters))]
        return joined(op.nn.attention(*parts, m))

    def expected(
        q: torch.Tensor, k: torch.Tensor, x: torch.Tensor, m: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        values = functional.linear(x, *rest)
        return functional.scaled_dot_product_attention(q[:, None], k[:, None], values[:, None], m)[:, 0]

    actual = hold(operator, expected, [*inputs, mask], weights)
    assert (actual[:, 7] == 0).all()
    assert not projected(lowered(operator, [*inputs, mask], weights))


@pytest.mark.parametrize("causal", ["TopLeft", "BottomRight"])
def test_not_where_keys_are_masked_by_a_diagonal(causal: str) -> None:
    inputs, weights = tensors(20, 300, 8, 32)
    assert not projected(lowered(layer(causal=causal), inputs, weights))


def test_not_with_several_heads() -> None:
    """Each head has a part of the channels; all of the narrow ones would be more."""
    inputs, weights = tensors(20, 300, 8, 32, heads=2)
    hold(layer(2), reference(2), inputs, weights)
    assert not projected(lowered(layer(2), inputs, weights))


@pytest.mark.parametrize(("narrow", "wide", "keys"), [(32, 32, 300), (40, 32, 300), (30, 32, 400)])
def test_not_where_it_saves_nothing(narrow: int, wide: int, keys: int) -> None:
    assert not projected(lowered(layer(), *tensors(20, keys, narrow, wide)))


@pytest.mark.parametrize("where", ["result", "key", "value and key"])
def test_not_where_something_else_reads_the_values(where: str) -> None:
    inputs, weights = tensors(20, 300, 8, 32)

    def operator(q: relax.Expr, k: relax.Expr, x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        values = emitted(linear(x, w, b))
        if where == "result":
            attended = joined(op.nn.attention(split(q), split(k), split(values)))
            return op.add(attended, op.strided_slice(values, [1], [0], [20]))
        heads = emitted(split(values, first=False))
        return joined(op.nn.attention(split(q), heads if where == "value and key" else split(values), heads))

    def expected(*parts: torch.Tensor) -> torch.Tensor:
        q, k, x, w, b = parts
        values = functional.linear(x, w, b)
        keys = k if where == "result" else values
        attended = functional.scaled_dot_product_attention(q[:, None], keys[:, None], values[:, None])[:, 0]
        return attended + values[:, :20] if where == "result" else attended

    hold(operator, expected, inputs, weights)
    assert not projected(lowered(operator, inputs, weights))


# --- what is told of it ---


def operators_of(inputs: list[np.ndarray], weights: list[np.ndarray]) -> list[Operator]:
    target = cpu_target()
    return trace(imported(inputs, weights), cpu_pipeline(target), target)


def imported(inputs: list[np.ndarray], weights: list[np.ndarray]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    parameters = [
        relax.Var(f"x{i}", relax.TensorType(list(array.shape), "float32"))
        for i, array in enumerate([*inputs, *weights])
    ]
    with builder.function("main", parameters, attrs={"num_input": len(inputs)}):
        with builder.dataflow():
            result = builder.emit_output(layer()(*parameters))
        builder.emit_func_output(result)
    return builder.get()


def test_the_layer_is_folded_into_the_kernels_that_do_it() -> None:
    operators = {operator.name: operator for operator in operators_of(*tensors(50, 600, 16, 64))}
    assert operators["nn.attention"].how is LoweringKind.KERNEL
    assert "values projected afterwards" in operators["nn.attention"].detail
    assert "50x16 · 16x64" in operators["nn.attention"].detail
    assert operators["matmul"].how is LoweringKind.FOLDED and operators["add"].how is LoweringKind.FOLDED


def test_what_can_be_tuned_is_what_runs() -> None:
    """The product has as many rows as there are queries, and there is none with as many as keys."""
    found = [workload.key for workload in workloads(imported(*tensors(50, 600, 16, 64)), cpu_target())]
    assert sorted(found) == ["attention 1x1 50x600x32 to 16", "product 1x50x16x64 left"]


def test_operations_saved() -> None:
    """Of attention to seven memories: three eighths of what the attention takes, and nearly all of the layer."""
    flop = {}
    for narrow in (64, 256):
        shapes = [(1, 5184, 256), (1, 36352, 256), (1, 36352, narrow)]
        module = lowered(layer(), [np.zeros(s, np.float32) for s in shapes], [np.zeros((256, narrow), np.float32)])
        flop[narrow] = sum(info.flop or 0 for info in infos_of(module).values())
    assert 0.6 < flop[64] / flop[256] < 0.65
