"""Facts of functions are data: what is written into an attribute is read back, and nobody reads the sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from harness.compiler.schedules.common.attention import Attention
from harness.compiler.schedules.common.kernel_info import (
    ATTENTION,
    DEPTHWISE,
    FILTERING,
    PRODUCT,
    UNSCHEDULED,
    KernelInfo,
    Kind,
    LostSchedule,
    describe,
    info_of,
    infos_of,
    kernel,
    lost_schedules,
    size_of,
    with_info,
)

pytestmark = pytest.mark.smoke

WORDS = st.text(max_size=12)
SIZES = st.dictionaries(WORDS, st.integers(0, 1 << 40), max_size=4)
NAMES = st.lists(WORDS, max_size=3).map(tuple)
INFOS = st.builds(
    KernelInfo,
    st.sampled_from(Kind),
    operator=WORDS,
    algorithm=WORDS,
    extents=SIZES,
    dtype=WORDS,
    tile=SIZES,
    decisions=st.dictionaries(WORDS, st.integers() | WORDS, max_size=4),
    reads=NAMES,
    writes=NAMES,
    flop=st.none() | st.integers(0, 1 << 60),
    bytes_moved=st.none() | st.integers(0, 1 << 60),
    schedules=NAMES,
    lost=st.lists(st.builds(LostSchedule, WORDS, WORDS, WORDS), max_size=2).map(tuple),
)


def bare() -> tvm.tirx.PrimFunc:
    return tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0))


@given(INFOS)
def test_facts_are_read_back_as_they_were_written(info: KernelInfo) -> None:
    assert KernelInfo.from_json(info.to_json()) == info
    function = with_info(bare(), info)
    assert info_of(function) == info
    module = tvm.ir.load_json(tvm.ir.save_json(tvm.IRModule({"only": function, "bare": bare()})))
    assert infos_of(module) == {"only": info}
    assert describe(info).count("unscheduled: ") >= len(info.lost)


def test_what_is_not_known_is_left_out() -> None:
    assert json.loads(KernelInfo(Kind.HELPER).to_json()) == {"kind": "helper"}
    assert info_of(bare()) is None


CONVOLUTION = {
    "batch": 2,
    "filters": 256,
    "channels": 128,
    "kernel_height": 3,
    "kernel_width": 3,
    "height": 72,
    "width": 36,
}
HEADS = Attention(batch=9, heads=16, queries=576, keys=200, channels=64, width=64)
DESCRIBED: dict[str, tuple[KernelInfo, str]] = {
    "product": (
        replace(
            kernel("matmul", PRODUCT, batch=8, rows=201, depth=32, columns=35),
            tile={"rows": 12, "columns": 32},
            decisions={"streaming": "left"},
        ),
        "8 times 201x32 · 32x35, tile 12x32, streaming left",
    ),
    "minimal filtering": (
        kernel("nn.conv2d", FILTERING, **CONVOLUTION),
        "2 x 256x128x3x3 on 72x36, minimal filtering",
    ),
    "depthwise": (
        kernel("nn.conv2d", DEPTHWISE, **CONVOLUTION | {"batch": 1, "channels": 1}),
        "256x1x3x3 on 72x36, depthwise",
    ),
    "attention": (
        HEADS.info(ATTENTION, [True, True, False]),
        "9 x 16 heads, 576 queries, 200 keys, 64 channels, queries and keys computed while they are read",
    ),
    "another kernel": (kernel("nn.softmax", lines=3, count=50), "3 lines, 50 count"),
    "loops": (KernelInfo(Kind.LOOPS, schedules=("flat", "flat", "rows")), "flat, rows"),
}


@pytest.mark.parametrize(("info", "sentence"), DESCRIBED.values(), ids=DESCRIBED)
def test_facts_as_a_sentence(info: KernelInfo, sentence: str) -> None:
    assert describe(info) == sentence
    assert sentence.startswith(size_of(info))


def test_lost_schedules_of_a_module_are_sentences() -> None:
    lost = LostSchedule("tiled", "the loop is not serial", "T_add")
    info = KernelInfo(Kind.LOOPS, schedules=(UNSCHEDULED,), lost=(lost,))
    module = tvm.IRModule({"add": with_info(bare(), info), "other": with_info(bare(), KernelInfo(Kind.KERNEL))})
    assert lost_schedules(module) == ("add: schedule tiled of block T_add was lost: the loop is not serial",)
    assert "unscheduled: schedule tiled of block T_add was lost: the loop is not serial" in describe(info)
