"""Matrix products on the CPU: any shape, any edge, careful sums, fused epilogues, weights packed once."""

from __future__ import annotations

import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax

from conformance.support.bf16 import rounded
from conformance.support.examples import examples
from conformance.support.kernels import call_of, functions_of, hold, hold_result, lowered, machine_of, run
from conformance.support.operators import normal
from harness.compiler.schedules.common.kernel_info import infos_of
from harness.compiler.schedules.cpu.emit import spread

op = relax.op
few = examples(12)
EXTENTS = st.sampled_from([1, 2, 3, 7, 12, 13, 31, 32, 33, 48, 65, 100, 130])
DEPTHS = st.sampled_from([1, 2, 16, 31, 64, 129, 256, 577])


def linear(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return op.matmul(x, op.permute_dims(w))


def weight(rows: int, columns: int, seed: int = 1) -> np.ndarray:
    """Scaled so that results are about 1, as in a trained model."""
    return normal((rows, columns), seed, scale=columns**-0.5)


@few
@given(leading=st.lists(st.integers(1, 3), max_size=2), rows=EXTENTS, columns=EXTENTS, depth=DEPTHS)
def test_linear(leading: list[int], rows: int, columns: int, depth: int) -> None:
    hold(linear, functional.linear, [normal((*leading, rows, depth))], [weight(columns, depth)])


@few
@given(
    batch=st.sampled_from(
        [((), (3,)), ((2,), ()), ((2, 1), (3,)), ((2, 1, 3), (1, 4, 1)), ((2, 3), (2, 3)), ((1,), (5,))]
    ),
    rows=EXTENTS,
    columns=EXTENTS,
    depth=DEPTHS,
    swapped=st.tuples(st.booleans(), st.booleans()),
)
def test_batched_product_with_broadcast_and_transposed_operands(
    batch: tuple[tuple[int, ...], tuple[int, ...]],
    rows: int,
    columns: int,
    depth: int,
    swapped: tuple[bool, bool],
) -> None:
    def swap(rank: int) -> list[int]:
        return [*range(rank - 2), rank - 1, rank - 2]

    def product(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        a, b = (
            op.permute_dims(x, swap(len(x.ty.shape))) if flag else x for x, flag in zip((a, b), swapped, strict=True)
        )
        return op.matmul(a, b)

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.mT if swapped[0] else a) @ (b.mT if swapped[1] else b)

    left, right = normal((*batch[0], rows, depth)), normal((*batch[1], depth, columns), 1, scale=depth**-0.5)
    left, right = (np.swapaxes(x, -1, -2) if flag else x for x, flag in zip((left, right), swapped, strict=True))
    hold(product, reference, [np.ascontiguousarray(left), np.ascontiguousarray(right)])


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((5,), (5, 7)), ((3, 5), (5,)), ((2, 3, 5), (5,)), ((5,), (2, 5, 7))])
def test_vectors(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    hold(op.matmul, torch.matmul, [normal(shapes[0]), normal(shapes[1], 1)])


@pytest.mark.parametrize("depth", [64, 256, 1024, 4736])
def test_long_sums_are_as_accurate_as_pytorch(depth: int) -> None:
    """With an offset the sum grows steadily, which is where one running fp32 sum loses digits."""
    w = weight(128, depth)
    call = call_of(machine_of(lowered(linear, [normal((96, depth))], [w])), [w])
    for offset in (0.0, 1.0):
        x = normal((96, depth), offset=offset)
        hold_result(call(x), functional.linear, [x, w], large=True)


def test_a_sum_of_many_terms_is_better_than_one_running_sum() -> None:
    depth = 4736
    x, w = np.abs(normal((24, depth))), np.abs(weight(64, depth))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    running = np.cumsum(x[:, None, :] * w[None, :, :], axis=-1, dtype=np.float32)[..., -1]
    actual = run(linear, [x], [w])
    assert np.abs(actual - exact).max() < 0.2 * np.abs(running - exact).max()


@pytest.mark.smoke
@few
@given(
    rows=st.sampled_from([1, 5, 40]),
    columns=st.sampled_from([1, 4, 33, 64]),
    activation=st.sampled_from(["relu", "gelu", "silu", "sigmoid"]),
    residual_first=st.booleans(),
)
def test_bias_activation_scale_and_residual_are_fused(
    rows: int, columns: int, activation: str, residual_first: bool
) -> None:
    activations = {"relu": op.nn.relu, "gelu": op.nn.gelu, "silu": op.nn.silu, "sigmoid": op.sigmoid}

    def operator(x: relax.Expr, r: relax.Expr, w: relax.Expr, b: relax.Expr, s: relax.Expr) -> relax.Expr:
        y = activations[activation](op.reshape(op.add(linear(x, w), b), [2, rows, columns]))
        y = op.subtract(relax.const(0.5), op.multiply(y, s))
        return op.add(r, y) if residual_first else op.divide(op.add(y, r), relax.const(3.0))

    def reference(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, w, b).reshape(2, rows, columns)
        y = 0.5 - (torch.sigmoid(y) if activation == "sigmoid" else getattr(functional, activation)(y)) * s
        return r + y if residual_first else (y + r) / 3

    inputs = [normal((2 * rows, 40)), normal((2, rows, columns), 5)]
    weights = [weight(columns, 40), normal((columns,), 2), normal((1, 1, columns), 3)]
    hold(operator, reference, inputs, weights)
    names = functions_of(lowered(operator, inputs, weights))
    assert len(names) == 2, names  # packing and product: no pass over memory beside it


def test_sum_of_several_products() -> None:
    def operator(x: relax.Expr, *weights: relax.Expr) -> relax.Expr:
        a, b, c = (op.nn.relu(linear(x, w)) for w in weights)
        return op.nn.relu(op.add(op.add(a, b), c))

    def reference(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        a, b, c = (torch.relu(functional.linear(x, w)) for w in weights)
        return torch.relu(a + b + c)

    hold(operator, reference, [normal((5, 24))], [weight(40, 24, seed) for seed in (1, 2, 3)])


def once(weight: relax.Expr) -> relax.Expr:
    return op.broadcast_to(op.permute_dims(weight), [6, 24, 40])


def several(weight: relax.Expr) -> relax.Expr:
    """As PyTorch merges dimensions for a linear layer of four dimensions that was permuted."""
    return op.reshape(op.broadcast_to(op.permute_dims(weight), [3, 2, 24, 40]), [6, 24, 40])


def stored(operator: Callable[..., relax.Expr], inputs: list[np.ndarray], weights: list[np.ndarray]) -> int:
    """Elements of the packed weight."""
    packed = lowered(operator, inputs, weights)["main"].params[-1].ty.shape
    return int(np.prod([int(extent) for extent in packed]))


@pytest.mark.parametrize("expanded", [once, several])
def test_an_expanded_weight_is_stored_once(expanded: Callable[[relax.Expr], relax.Expr]) -> None:
    def operator(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.matmul(x, expanded(w))

    inputs, weights = [normal((6, 5, 24))], [weight(40, 24)]
    hold(operator, lambda x, w: torch.bmm(x, w.T.expand(6, 24, 40)), inputs, weights)
    assert stored(operator, inputs, weights) < 2 * weights[0].size


def test_an_expanded_weight_in_bf16_is_stored_once() -> None:
    def operator(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.matmul(op.astype(x, "bfloat16"), several(w), out_dtype="float32")

    inputs, weights = [normal((6, 5, 24))], [rounded(weight(40, 24))]
    assert stored(operator, inputs, weights) < weights[0].size, "pairs, half as many as there are terms"


def test_weights_that_differ_stay_several() -> None:
    def operator(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.matmul(x, op.reshape(op.broadcast_to(w, [3, 2, 24, 40]), [6, 24, 40]))

    inputs, weights = [normal((6, 5, 24))], [normal((2, 24, 40), 1)]
    hold(operator, lambda x, w: torch.bmm(x, w.expand(3, 2, 24, 40).reshape(6, 24, 40)), inputs, weights)


def test_a_product_that_is_used_twice_is_stored() -> None:
    def operator(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        y = relax.BlockBuilder.current().emit(linear(x, w))
        return op.multiply(op.nn.relu(y), y)

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, w)
        return torch.relu(y) * y

    hold(operator, reference, [normal((20, 40))], [weight(50, 40)])


@pytest.mark.parametrize("shape", [(20, 1), (3, 20, 50)], ids=str)
def test_an_operand_broadcast_over_columns_or_wider_than_the_product(shape: tuple[int, ...]) -> None:
    hold(
        lambda x, c, w: op.add(linear(x, w), c),
        lambda x, c, w: functional.linear(x, w) + c,
        [normal((20, 40)), normal(shape, 3)],
        [weight(50, 40)],
    )


def test_edges_do_not_leak() -> None:
    """A special value in the last row or column reaches its own row or column only, padding or not."""
    x, w = normal((37, 50)), weight(45, 50)
    machine = machine_of(lowered(linear, [x], [w]))
    for value in (np.nan, np.inf):
        x[-1, 3], w[-1, 4] = value, value
        actual = hold_result(call_of(machine, [w])(x), functional.linear, [x, w])
        assert np.isfinite(actual[:-1, :-1]).all() and not np.isfinite(actual[-1]).any()


@given(total=st.integers(1, 100), count=st.integers(1, 600))
def test_the_steps_of_a_chunk_fetch_every_line_of_its_result(total: int, count: int) -> None:
    fetched: set[int] = set()
    for k in range(count):
        spread(total, count, k, fetched.add)
    assert fetched >= set(range(total)) and max(fetched) < total + count


def test_weights_are_packed_when_the_model_is_loaded() -> None:
    module = lowered(linear, [normal((20, 40))], [weight(50, 40)])
    assert "pack" in module["main_transform_params"].script()
    assert "pack" not in module["main"].script().replace("packed", "")


@pytest.mark.parametrize(("columns", "how"), [(8, "in place"), (200, "packed")])
@pytest.mark.parametrize("rows", [36, 37])
def test_rows_are_packed_unless_each_is_read_once(rows: int, columns: int, how: str) -> None:
    inputs, weights = [normal((2, rows, 300))], [weight(columns, 300)]
    infos = infos_of(lowered(linear, inputs, weights)).items()
    assert [info.decisions["read"] for name, info in infos if name.startswith("matmul")] == [how]
    hold(linear, functional.linear, inputs, weights)


def test_rows_that_were_moved_around_are_read_where_they_lie() -> None:
    """A window partition, 5 rows of 3 windows, by few columns."""
    hold(
        lambda x, w: linear(op.permute_dims(op.reshape(x, (5, 3, 7, 40)), [1, 0, 2, 3]), w),
        lambda x, w: functional.linear(x.reshape(5, 3, 7, 40).permute(1, 0, 2, 3), w),
        [normal((105, 40))],
        [weight(6, 40)],
    )


def test_equal_shapes_share_one_kernel() -> None:
    def operator(x: relax.Expr, *weights: relax.Expr) -> relax.Expr:
        for w in weights:
            x = linear(x, w)
        return x

    weights = [weight(64, 64, seed) for seed in range(5)]
    assert len(functions_of(lowered(operator, [normal((40, 64))], weights))) == 2
    hold(operator, lambda x, *w: torch.linalg.multi_dot([x, *[m.T for m in w]]), [normal((40, 64))], weights)


@pytest.mark.parametrize("cpu", ["x86-64", "x86-64-v3"])
def test_processors_without_avx512(cpu: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"a {platform.machine()} processor cannot run code for {cpu}")
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu})
    hold(linear, functional.linear, [normal((3, 37, 300))], [weight(45, 300)], target=target, large=True)


@pytest.mark.parametrize("triple", ["arm64-apple-macos", "aarch64-linux-gnu"])
def test_compiles_for_arm(triple: str) -> None:
    target = tvm.target.Target({"kind": "llvm", "mtriple": triple, "mcpu": "apple-m1"})
    module = lowered(linear, [normal((37, 300))], [weight(45, 300)], target)
    assembly = relax.build(module, target, relax_pipeline=None).mod.imports[0].inspect_source("asm")
    assert "fmla" in assembly


def test_other_types_keep_tvms_lowering() -> None:
    x, w = normal((4, 5)).astype(np.float64), normal((5, 6)).astype(np.float64)
    np.testing.assert_allclose(run(op.matmul, [x], [w]), x @ w, rtol=1e-14)
