"""Convolutions that multiply bfloat16 on CPUs with an instruction for pairs: any geometry, bit for bit as in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from tvm import relax

from conformance.schedules.cpu.test_cpu_bf16 import (
    ARM_PRODUCTS,
    DOT_PRODUCTS,
    WITH_INSTRUCTION,
    WITHOUT_INSTRUCTION,
    assembled,
    extreme,
    runs,
    with_instruction,
)
from conformance.schedules.cpu.test_cpu_threads import hold_module as hold_on_threads
from conformance.support.assembly import assembly, product_loops
from conformance.support.bf16 import hold_to_upstream, product, rounded
from conformance.support.convolutions import (
    AROUND,
    PLAIN,
    Geometry,
    as_product,
    convolutions,
    filters,
    of_upsampled,
    transposed_by_taps,
    upsampled_by_places,
)
from conformance.support.cpus import target_for
from conformance.support.examples import examples
from conformance.support.kernels import functions_of, lowered, run
from conformance.support.operators import normal
from conformance.support.place import computes
from harness.compiler.lowering.route import Route, lower
from harness.compiler.schedules.common.kernel_info import infos_of
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.schedules.cpu.bf16 import allow_bf16

few = examples(15)


def rounding(geometry: Geometry = PLAIN) -> Callable[[relax.Expr, relax.Expr], relax.Expr]:
    """The operator where `harness.compiler.lowering.precision` rounds what is multiplied to bfloat16."""
    return lambda x, weight: allow_bf16(geometry.conv2d(x, weight))


def conv2d_transpose(x: relax.Expr, weight: relax.Expr) -> relax.Expr:
    return allow_bf16(relax.op.nn.conv2d_transpose(x, weight, (2, 2)))


def emulated(cpu: str, x: np.ndarray, weight: np.ndarray, at: Geometry = PLAIN) -> np.ndarray:
    """The products of `conformance.support.bf16` with the columns that PyTorch gathers."""
    processor, channels = WITH_INSTRUCTION[cpu], weight.shape[1]
    return as_product(x, weight, at, lambda columns, rows: product(columns, rounded(rows), processor, channels))


# --- bit for bit ---


@with_instruction
@few
@given(convolutions(batch=2, groups=[1, 1, 2], inner=[2, 6, 16], height=20, width=40))
def test_any_convolution(cpu: str, convolution: tuple[np.ndarray, np.ndarray, Geometry]) -> None:
    x, weight, geometry = convolution
    actual = run(rounding(geometry), [x], [weight], target_for(cpu))
    np.testing.assert_array_equal(actual, emulated(cpu, x, weight, geometry))


@with_instruction
@pytest.mark.parametrize(
    ("channels", "size", "outer", "kernel", "padding"),
    [
        (256, (20, 72), 256, 3, 1),
        (48, (4, 288), 64, 3, 1),
        (256, (9, 33), 32, 1, 0),
        (64, (7, 7), 48, 7, 0),
    ],
    ids=["3x3-72", "3x3-288", "1x1", "7x7-whole"],
)
def test_shapes_of_sam3(cpu: str, channels: int, size: tuple[int, int], outer: int, kernel: int, padding: int) -> None:
    """Sums of several chunks among them."""
    x, weight = normal((2, channels, *size)), filters(outer, channels, kernel, kernel)
    geometry = Geometry(padding=(padding, padding))
    actual = run(rounding(geometry), [x], [weight], target_for(cpu))
    np.testing.assert_array_equal(actual, emulated(cpu, x, weight, geometry))


@with_instruction
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (9, 36)])
def test_transposed_2x2_stride_2(cpu: str, size: tuple[int, int]) -> None:
    x, weight = normal((2, 64, *size)), normal((64, 24, 2, 2), 1, scale=1 / 16)
    actual = run(conv2d_transpose, [x], [weight], target_for(cpu))
    np.testing.assert_array_equal(actual, transposed_by_taps(x, weight, partial(emulated, cpu)))


@with_instruction
@few
@given(
    images=st.integers(1, 2),
    channels=st.sampled_from([32, 64, 256]),
    outer=st.sampled_from([32, 45]),
    size=st.tuples(st.integers(1, 9), st.integers(1, 40)),
)
def test_an_upsampled_image(cpu: str, images: int, channels: int, outer: int, size: tuple[int, int]) -> None:
    x, weight = normal((images, channels, *size)), filters(outer, channels, 3, 3)
    actual = run(of_upsampled(rounding(AROUND)), [x], [weight], target_for(cpu))
    np.testing.assert_array_equal(actual, upsampled_by_places(x, weight, partial(emulated, cpu)))


@with_instruction
@pytest.mark.parametrize("size", [(5, 7), (9, 36)])
def test_convolutions_in_turn_store_what_the_next_one_rounds(cpu: str, size: tuple[int, int]) -> None:
    """As where the neck enlarges the image's features: transposed, 1x1, and 3x3, whose result is fp32."""
    x, wider, mixed, near = (
        normal((1, 64, *size)),
        normal((64, 24, 2, 2), 1),
        filters(16, 24, 1, 1),
        filters(32, 16, 3, 3),
    )
    around = Geometry(padding=(1, 1))

    def in_turn(x: relax.Expr, wider: relax.Expr, mixed: relax.Expr, near: relax.Expr) -> relax.Expr:
        return rounding(around)(rounding()(conv2d_transpose(x, wider), mixed), near)

    functions = functions_of(lowered(in_turn, [x], [wider, mixed, near], target_for(cpu)))
    names = {name.replace("_bfmmla", "") for name in functions}
    assert {"conv2d_transpose_bf16_astype", "conv2d_bf16_astype", "conv2d_bf16"} <= names, names
    alone = (run(conv2d_transpose, [x], [wider], target_for(cpu)), mixed)
    expected = emulated(cpu, emulated(cpu, *alone), near, around)
    np.testing.assert_array_equal(run(in_turn, [x], [wider, mixed, near], target_for(cpu)), expected)


@with_instruction
def test_denormals_infinities_and_nan(cpu: str) -> None:
    x, weight = extreme((1, 2, 20, 30), 0), extreme((70, 2, 1, 1), 1)
    expected = emulated(cpu, x, weight)
    assert np.isnan(expected).any() and np.isinf(expected).any()
    np.testing.assert_array_equal(run(rounding(), [x], [weight], target_for(cpu)), expected)


@with_instruction
def test_padding_is_zero_beside_infinities(cpu: str) -> None:
    """An infinite pixel reaches its neighbours alone; what lies beyond the edge is no pixel of another line."""
    x = np.zeros((1, 2, 9, 40), np.float32)
    x[0, :, 4, -1] = np.inf
    weight = np.ones((16, 2, 3, 3), np.float32)
    actual = run(rounding(AROUND), [x], [weight], target_for(cpu))
    expected = np.zeros_like(actual)
    expected[:, :, 3:6, -2:] = np.inf
    np.testing.assert_array_equal(actual, expected)


@runs("cooperlake")
@pytest.mark.parametrize("kernel", [1, 3])
def test_threads_do_not_change_a_number(kernel: int, tmp_path: Path) -> None:
    arrays, target = [normal((1, 64, 30, 50)), filters(96, 64, kernel, kernel)], target_for("cooperlake")
    hold_on_threads(lowered(rounding(), arrays, target=target), target, tmp_path, arrays)


# --- which kernel ---


def test_an_odd_number_of_channels_is_not_rounded() -> None:
    """The pixels of a photograph have three."""
    x, weight = normal((1, 3, 28, 42)), filters(64, 3, 14, 14)
    names = functions_of(lowered(rounding(Geometry(stride=(14, 14))), [x], [weight], target_for("znver5")))
    assert names == ["conv2d", "pack"]


@pytest.mark.parametrize("cpu", WITHOUT_INSTRUCTION)
def test_without_the_instruction_minimal_filtering_in_fp32_is_faster(cpu: str) -> None:
    x, weight = normal((1, 64, 36, 36)), filters(64, 64, 3, 3)
    target = target_for(cpu)
    operators = (rounding(AROUND), AROUND.conv2d)
    kernels = [infos_of(lowered(operator, [x], [weight], target)) for operator in operators]
    assert kernels[0] == kernels[1]


IMAGES = [(256, 256, 3, 72, False), (256, 32, 1, 72, False), (64, 8, 3, 72, False), (2, 8, 3, 72, False)]
IMAGES += [(256, 256, 3, 72, True), (256, 48, 3, 11, True)]
"""Channels, filters, their size, the width of an image of 24 lines, and whether it is upsampled."""


@assembled(*DOT_PRODUCTS, *ARM_PRODUCTS)
@pytest.mark.parametrize(("channels", "outer", "kernel", "width", "upsampled"), IMAGES)
def test_sums_stay_in_registers(cpu: str, channels: int, outer: int, kernel: int, width: int, upsampled: bool) -> None:
    target, operator = target_for(cpu), of_upsampled(rounding(AROUND)) if upsampled else rounding(AROUND)
    x, weight = normal((1, channels, 24, width)), filters(outer, channels, kernel, kernel)
    loops = product_loops(assembly(lowered(operator, [x], [weight], target), target))
    assert loops
    for loop in loops:
        shown = "\n".join(instruction.text for instruction in loop.instructions)
        assert not loop.spills, shown
        wanted = "vdpbf16ps" if cpu in DOT_PRODUCTS else "bfmmla" if channels % 4 == 0 else "bfdot"
        assert {instruction.operation for instruction in loop.fused} == {wanted}, shown


class Pyramid(nn.Module):
    """What necks and heads are made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.one, self.three = nn.Conv2d(32, 48, 1), nn.Conv2d(48, 48, 3, padding=1)
        self.down = nn.Conv2d(48, 32, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fine = self.three(self.one(functional.gelu(self.up(x))))
        return fine, self.down(functional.relu(fine))


def test_a_network_is_no_less_accurate_than_upstream_under_autocast() -> None:
    block, target = Pyramid().eval(), target_for("cooperlake")
    args = (torch.randn(1, 64, 18, 22, generator=torch.Generator().manual_seed(1)),)
    made = lower(block, args, Route(precision="bf16"))
    module = cpu_pipeline(target)(made.module)
    names = [name for name in functions_of(module) if name.startswith("conv2d")]
    assert len(names) == 4 and all("bf16" in name for name in names), names
    if not computes(target):
        pytest.skip("this machine cannot run it")
    hold_to_upstream(block, made, module, args, ("fine", "coarse"), target)
