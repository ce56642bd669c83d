"""The default CPU schedule: it changes no result, splits long fp32 sums, never fails, and is really applied."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax, tirx

from conformance.support.assembly import assembly
from conformance.support.examples import examples
from conformance.support.kernels import lowered
from conformance.support.operators import EPSILON, compiled, error_ratio, module_of, normal, rms
from conformance.support.place import cpu_target, functions, virtual_machine
from harness.compiler.schedules.common.kernel_info import info_of
from harness.compiler.schedules.cpu.elementwise import schedule_function, schedule_remaining

extents = st.sampled_from([1, 2, 3, 7, 16, 33, 96, 257])


def fused(operator: Callable[..., relax.Expr], *shapes: tuple[int, ...], dtype: str = "float32") -> tvm.IRModule:
    """TVM's own legalization and fusion of the operator: what the schedule finds."""
    with cpu_target():
        return tvm.transform.Sequential(
            [
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
            ]
        )(module_of(operator, shapes, dtype))


def executable(module: tvm.IRModule) -> Callable[..., np.ndarray]:
    target = cpu_target()
    machine = virtual_machine(relax.build(module, target), target)

    def run(*arrays: np.ndarray) -> np.ndarray:
        return machine["main"](*[tvm.runtime.tensor(np.asarray(a, order="C"), tvm.cpu()) for a in arrays]).numpy()

    return run


def bodies(module: tvm.IRModule) -> list[str]:
    return [f.script() for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]


def check_unchanged(operator: Callable[..., relax.Expr], *shapes: tuple[int, ...], dtype: str = "float32") -> None:
    """With and without the schedule every bit is the same."""
    if dtype == "float32":
        arrays = [normal(shape, n) for n, shape in enumerate(shapes)]
    else:
        arrays = [np.random.default_rng(n).integers(0, 9, shape).astype(dtype) for n, shape in enumerate(shapes)]
    plain = fused(operator, *shapes, dtype=dtype)
    want = executable(plain)(*arrays)
    np.testing.assert_array_equal(executable(schedule_remaining(plain))(*arrays), want)


@examples(10)
@given(rows=extents, columns=extents, batch=st.sampled_from([1, 3]))
def test_broadcast_arithmetic(rows: int, columns: int, batch: int) -> None:
    check_unchanged(
        lambda a, b, c: relax.op.multiply(relax.op.nn.relu(relax.op.add(a, b)), c),
        (batch, rows, columns),
        (columns,),
        (rows, 1),
    )


@examples(12)
@given(data=st.data())
def test_transposition_of_any_rank(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 5, 16, 33, 64]), min_size=1, max_size=4)))
    order = data.draw(st.permutations(range(len(shape))))
    x = normal(shape)
    module = schedule_remaining(fused(lambda a: relax.op.permute_dims(a, list(order)), shape))
    np.testing.assert_array_equal(executable(module)(x), x.transpose(order))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "bool"])
def test_transposition_of_any_type(dtype: str) -> None:
    check_unchanged(lambda a: relax.op.permute_dims(a, [0, 2, 1]), (3, 32, 96), dtype=dtype)


@pytest.mark.parametrize("operator", [relax.op.permute_dims, lambda a: relax.op.nn.relu(relax.op.permute_dims(a))])
@pytest.mark.parametrize("cpu", ["x86-64-v4", "x86-64-v3"])
def test_a_transposition_neither_gathers_nor_scatters(cpu: str, operator: Callable[[relax.Expr], relax.Expr]) -> None:
    """These instructions take several times as long as loads of the elements and one store."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": "x86_64-linux-gnu"})
    text = assembly(lowered(operator, [normal((256, 5184))], target=target), target)
    assert "insertps" in text and not re.search(r"scatter|gather", text)


@examples(8)
@given(windows=st.integers(1, 4), side=st.sampled_from([3, 8, 24]), width=st.sampled_from([1, 5, 64]))
def test_window_partition(windows: int, side: int, width: int) -> None:
    shape = (1, windows * side, windows * side, width)

    def operator(x: relax.Expr) -> relax.Expr:
        x = relax.op.reshape(x, [1, windows, side, windows, side, width])
        return relax.op.reshape(relax.op.permute_dims(x, [0, 1, 3, 2, 4, 5]), [windows**2, side**2, width])

    x = normal(shape)
    want = x.reshape(windows, side, windows, side, width).transpose(0, 2, 1, 3, 4).reshape(-1, side**2, width)
    np.testing.assert_array_equal(executable(schedule_remaining(fused(operator, shape)))(x), want)


UNCHANGED: dict[str, tuple[Callable[..., relax.Expr], list[tuple[int, ...]], str]] = {
    "concat": (lambda a, b: relax.op.concat([a, b], 1), [(9, 31, 40), (9, 20, 40)], "float32"),
    "pad": (lambda a: relax.op.nn.pad(a, [0, 0, 1, 1, 2, 3]), [(16, 60, 41)], "float32"),
    "slice": (lambda a: relax.op.strided_slice(a, [1, 2], [3, 1], [50, 40]), [(16, 60, 41)], "float32"),
    "split": (lambda a: relax.op.split(a, 3, 1)[1], [(64, 96, 20)], "float32"),
    "where": (lambda a, b: relax.op.where(relax.op.greater(a, b), a, b), [(64, 600), (64, 600)], "float32"),
    "take": (lambda a, b: relax.op.take(a, relax.op.astype(relax.op.abs(b), "int32"), 0), [(8, 90), (50,)], "float32"),
    "max_pool2d": (lambda a: relax.op.nn.max_pool2d(a, (2, 2), (2, 2)), [(1, 64, 36, 34)], "float32"),
    "max_pool2d_pad": (lambda a: relax.op.nn.max_pool2d(a, (3, 3), (2, 2), (1, 1)), [(2, 32, 37, 35)], "float32"),
    "avg_pool2d": (lambda a: relax.op.nn.avg_pool2d(a, (3, 3), (2, 2), (1, 1)), [(1, 64, 37, 36)], "float32"),
    "argmax": (lambda a: relax.op.argmax(a, 1), [(120, 300)], "float32"),
    "integer_sum": (lambda a: relax.op.sum(a, [1]), [(120, 3000)], "int64"),
    "integers": (
        lambda a, b: relax.op.floor_divide(a, relax.op.add(b, relax.const(1, "int64"))),
        [(99, 345)] * 2,
        "int64",
    ),
    "broadcast_views": (
        lambda a, b: relax.op.add(relax.op.expand_dims(a, [1]), relax.op.expand_dims(b, [2])),
        [(20, 30, 8), (20, 40, 8)],
        "float32",
    ),
    "repeat": (lambda a: relax.op.repeat(relax.op.repeat(a, 2, 1), 2, 2), [(24, 40, 56)], "float32"),
    "repeat_by_three": (lambda a: relax.op.repeat(a, 3, 1), [(600, 77)], "float32"),
    "split_heads": (
        lambda a: relax.op.reshape(relax.op.permute_dims(a, [1, 0, 2]), [1, 8, 640, 32]),
        [(640, 8, 32)],
        "float32",
    ),
    "join_heads": (
        lambda a: relax.op.reshape(relax.op.permute_dims(a, [0, 2, 1, 3]), [640, 256]),
        [(1, 8, 640, 32)],
        "float32",
    ),
    "one_number": (lambda a: relax.op.add(a, a), [()], "float32"),
    "nearest": (
        lambda a: relax.op.image.resize2d(
            a,
            relax.ShapeExpr([72, 60]),
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
            layout="NCHW",
        ),
        [(1, 32, 36, 30)],
        "float32",
    ),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_schedule_changes_no_bit(name: str) -> None:
    operator, shapes, dtype = UNCHANGED[name]
    check_unchanged(operator, *shapes, dtype=dtype)


@pytest.mark.smoke
def test_one_function_fused_twice() -> None:
    def operator(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.op.add(relax.op.nn.gelu(a), relax.op.nn.gelu(b))

    a, b = normal((64, 700)), normal((64, 700), 1)
    want = sum(functional.gelu(torch.from_numpy(x).double()).numpy() for x in (a, b))
    np.testing.assert_allclose(compiled(operator, [a.shape, b.shape])(a, b), want, atol=1e-6)


@examples(6)
@given(height=st.integers(1, 40), width=st.integers(1, 40), to=st.tuples(st.integers(1, 80), st.integers(1, 80)))
def test_bilinear_resize(height: int, width: int, to: tuple[int, int]) -> None:
    def operator(x: relax.Expr) -> relax.Expr:
        return relax.op.image.resize2d(
            x,
            relax.ShapeExpr(list(to)),
            method="linear",
            coordinate_transformation_mode="half_pixel",
            layout="NCHW",
        )

    x = normal((1, 7, height, width))
    want = functional.interpolate(torch.from_numpy(x).double(), to, mode="bilinear", align_corners=False).numpy()
    np.testing.assert_allclose(compiled(operator, [x.shape])(x), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, None], ids=["columns", "rows", "everything"])
@pytest.mark.parametrize("shape", [(30, 4096), (4096, 30), (600, 625), (2, 100_000)], ids=str)
def test_long_sums_are_split(shape: tuple[int, ...], axis: int | None) -> None:
    """TVM's own sum, as it remains inside fused functions, loses digits; the scheduled one is as good as PyTorch's."""
    operator = relax.op.sum
    axes = None if axis is None else [axis]
    x = normal(shape, 0, offset=3.0)
    plain = fused(lambda a: operator(a, axes), shape)
    oracle = x.sum(axis=axis, dtype=np.float64)
    scheduled = executable(schedule_remaining(plain))(x)
    terms = x.size // oracle.size
    # A blocked sum of n terms in blocks of √n grows like the fourth root of n.
    assert rms(scheduled - oracle) <= EPSILON * rms(oracle) * max(1.0, terms**0.25)


def test_a_million_equal_terms() -> None:
    """The worst case of a running fp32 sum: the rounding errors all have the same sign."""
    x = np.full(1_000_000, 0.1, np.float32)
    plain = fused(lambda a: relax.op.sum(a), x.shape)
    exact = float(x.sum(dtype=np.float64))
    assert abs(executable(plain)(x) - exact) > 100
    assert abs(executable(schedule_remaining(plain))(x) - exact) < 1


@pytest.mark.parametrize("depth", [257, 1024, 4736])
def test_matrix_product_left_over(depth: int) -> None:
    a, b = normal((33, depth)), normal((depth, 20), 1)
    run = executable(schedule_remaining(fused(relax.op.matmul, a.shape, b.shape)))
    reference = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    assert error_ratio(run(a, b), reference, a.astype(np.float64) @ b.astype(np.float64)) <= 3.0


def test_large_work_is_parallel_and_small_is_not() -> None:
    def operator(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.op.add(a, b)

    assert "T.parallel" in bodies(schedule_remaining(fused(operator, (512, 512), (512,))))[0]
    assert "T.parallel" not in bodies(schedule_remaining(fused(operator, (8, 8), (8,))))[0]


def test_intermediate_results_are_inlined() -> None:
    def operator(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.op.multiply(relax.op.nn.gelu(relax.op.add(a, b)), b)

    module = fused(operator, (512, 512), (512,))
    assert bodies(module)[0].count("T.sblock_alloc_buffer(") >= 2
    assert bodies(schedule_remaining(module))[0].count("T.sblock_alloc_buffer(") == 0


def test_copies_are_inlined_however_often_they_are_read() -> None:
    def operator(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.op.add(relax.op.expand_dims(a, [1]), relax.op.expand_dims(b, [0]))

    scheduled = bodies(schedule_remaining(fused(operator, (64, 40), (64, 40))))[0]
    assert "T.sblock_alloc_buffer(" not in scheduled


def test_costly_value_with_many_readers_is_stored_once() -> None:
    def operator(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return relax.op.add(a, relax.op.exp(b))

    scheduled = bodies(schedule_remaining(fused(operator, (512, 512), (512,))))[0]
    assert scheduled.count("T.exp(") == 1
    assert scheduled.count("T.sblock_alloc_buffer(") == 1


def test_one_fused_gelu_read_at_two_places() -> None:
    """Inlining it twice would bind its variables twice."""

    def operator(x: relax.Expr) -> relax.Expr:
        g = relax.op.nn.gelu(x)
        return relax.op.subtract(relax.op.strided_slice(g, [1], [0], [50]), relax.op.strided_slice(g, [1], [50], [100]))

    x = normal((64, 100))
    g = functional.gelu(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(compiled(operator, [x.shape])(x), g[:, :50] - g[:, 50:], atol=1e-6)


def test_functions_with_a_schedule_stay_as_they_are() -> None:
    module = fused(lambda a: relax.op.add(a, a), (512, 512))
    (variable,) = [v for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)]
    module[variable] = module[variable].with_attr("tirx.is_scheduled", True)
    assert bodies(schedule_remaining(module)) == bodies(module)


def _unusual() -> dict[str, Any]:
    def dynamic() -> tirx.PrimFunc:
        n = tirx.Var("n", "int64")
        a = tvm.te.placeholder((n,), "float32", name="a")
        return tvm.te.create_prim_func([a, tvm.te.compute((n,), lambda i: a[i] + 1, name="b")])

    def scan() -> tirx.PrimFunc:
        a = tvm.te.placeholder((40, 30), "float32", name="a")
        return tvm.te.create_prim_func([a, tvm.topi.cumsum(a, 1)])

    def scatter() -> tirx.PrimFunc:
        a = tvm.te.placeholder((40, 30), "float32", name="a")
        i = tvm.te.placeholder((10, 30), "int64", name="i")
        u = tvm.te.placeholder((10, 30), "float32", name="u")
        return tvm.te.create_prim_func([a, i, u, tvm.topi.scatter_elements(a, i, u, 0)])

    def region() -> tirx.PrimFunc:
        a = tvm.te.placeholder((1, 8, 20, 20), "float32", name="a")
        r = tvm.te.placeholder((3, 5), "float32", name="r")
        return tvm.te.create_prim_func([a, r, tvm.topi.vision.roi_align_nchw(a, r, (7, 7), 1.0, "avg", -1)])

    return {"dynamic": dynamic, "scan": scan, "scatter": scatter, "roi_align": region}


def test_loops_with_symbolic_extents_run_in_parallel() -> None:
    function = schedule_function(_unusual()["dynamic"]())
    info = info_of(function)
    assert info is not None and not info.lost
    assert info.schedules == ("symbolic extents, the first in parallel",)
    assert "T.parallel(n)" in function.script()


@pytest.mark.parametrize("name", _unusual())
def test_unusual_functions_compile_and_keep_their_results(name: str) -> None:
    function = _unusual()[name]()
    scheduled = schedule_function(function)
    target = cpu_target()
    rng = np.random.default_rng(0)
    arrays: dict[str, list[np.ndarray]] = {
        "dynamic": [normal((77,)), np.zeros(77, np.float32)],
        "scan": [normal((40, 30)), np.zeros((40, 30), np.float32)],
        "scatter": [
            normal((40, 30)),
            np.stack([rng.permutation(40)[:10] for _ in range(30)], 1).astype(np.int64),
            normal((10, 30), 1),
            np.zeros((40, 30), np.float32),
        ],
        "roi_align": [
            normal((1, 8, 20, 20)),
            np.array([[0, 1, 2, 9, 12], [0, 0, 0, 19, 19], [0, 3, 3, 4, 4]], np.float32),
            np.zeros((3, 8, 7, 7), np.float32),
        ],
    }
    outcome = []
    for candidate in (function, scheduled):
        tensors = [tvm.runtime.tensor(a, tvm.cpu()) for a in arrays[name]]
        compiled_alone = tvm.compile(tvm.IRModule({"main": candidate.with_attr("global_symbol", "main")}), target)
        functions(compiled_alone, target)["main"](*tensors)
        outcome.append(tensors[-1].numpy().copy())
    np.testing.assert_allclose(outcome[1], outcome[0], rtol=1e-6, atol=1e-6)
    assert np.any(outcome[0])


def split_after_transposition(x: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    return relax.op.reshape(relax.op.permute_dims(x, [0, 2, 1]), shape)


def test_a_transposition_goes_in_tiles_although_a_reshape_splits_its_last_dimension() -> None:
    module = schedule_remaining(fused(lambda x: split_after_transposition(x, (2, 64, 36, 40)), (2, 1440, 64)))
    (function,) = (function for _, function in module.functions_items() if isinstance(function, tirx.PrimFunc))
    info = info_of(function)
    assert info is not None and info.schedules == ("tiled",)


@examples(12)
@given(
    batch=st.integers(1, 2),
    rows=st.tuples(*[st.sampled_from([1, 5, 8, 36])] * 2),
    columns=st.tuples(*[st.sampled_from([1, 3, 16])] * 2),
    merged=st.booleans(),
)
def test_a_transposition_and_a_reshape(
    batch: int, rows: tuple[int, int], columns: tuple[int, int], merged: bool
) -> None:
    """The reshape splits dimensions, or cuts runs of memory that begin and end within them."""
    source = (batch, rows[0] * rows[1], columns[0] * columns[1])
    shape = (batch * columns[0], columns[1] * rows[0], rows[1]) if merged else (batch, *columns, *rows)
    check_unchanged(lambda x: split_after_transposition(x, shape), source)
