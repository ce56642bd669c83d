"""TVM's RoPE of language models: what it computes as it is, and the position maps that the strategy `llm` gives it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from hypothesis import given
from hypothesis import strategies as st

from harness.compiler.lowering.rope.operators.position_maps import axial, from_table, rotate
from harness.compiler.lowering.rope.real import axial_tables

EPS = torch.finfo(torch.float32).eps
SIDE, HALF, THETA = 72, 32, 10000.0


@pytest.mark.law
@given(
    quarter=st.integers(1, 8),
    width=st.integers(1, 7),
    height=st.integers(1, 7),
    scale=st.sampled_from((0.0, 24 / 72, 1.0)),
    offset=st.integers(-3, 100),
    class_token=st.booleans(),
)
def test_position_maps_hold_the_table_without_rounding(sam3, quarter, width, height, scale, offset, class_token):
    table = sam3.tracker_rope.compute_axial_cis(4 * quarter, width, height, scale_pos=scale, offset=offset)
    if class_token:
        table = torch.cat((torch.ones_like(table[:1]), table))
    positions, turns = from_table(table)
    assert positions.dtype == torch.int32 and positions.shape == (len(table), 2)
    # a position of either axis is stored once
    assert len(turns) <= max(width, height) + class_token
    assert torch.equal(turns[positions.long()].flatten(1, 2), torch.view_as_real(table))


@given(quarter=st.integers(1, 8), width=st.integers(1, 7), height=st.integers(1, 7))
def test_computed_position_maps_are_the_axial_tables(quarter, width, height):
    positions, turns = axial(4 * quarter, width, height, THETA)
    expected = torch.stack(axial_tables(4 * quarter, width, height, THETA), dim=-1)
    assert torch.equal(turns[positions.long()].flatten(1, 2), expected)


@pytest.mark.parametrize(("tokens", "features", "repeat"), [(5, 8, 1), (6, 4, 1), (6, 8, 2), (13, 8, 2)])
def test_position_maps_that_do_not_fit_are_refused(tokens, features, repeat):
    with pytest.raises(ValueError, match="do not fit"):
        rotate(torch.zeros(1, 1, tokens, features), *axial(8, 3, 2, THETA), repeat)


def tvms_own(x: torch.Tensor, positions: torch.Tensor, scale: float) -> torch.Tensor:
    """TVM's kernel, untouched: queries [tokens, heads, HALF] rotated at scaled integer positions."""
    from tvm.relax.frontend.nn.llm.position_embedding import llama_rope_with_position_map

    tokens, heads, _ = x.shape
    kernel = llama_rope_with_position_map(
        theta=THETA,
        scale=scale,
        head_dim=HALF,
        num_q_heads=heads,
        num_kv_heads=1,
        dtype="float32",
        rope_scaling={"rope_type": "gptj"},
    )
    library = tvm.compile(tvm.IRModule({"rope": kernel.with_attr("global_symbol", "rope")}), target="llvm")
    fused = torch.cat((x, torch.zeros(tokens, 2, HALF)), dim=1)
    outputs = [tvm.runtime.tensor(np.zeros((tokens, n, HALF), "float32")) for n in (heads, 1, 1)]
    inputs = [tvm.runtime.tensor(array) for array in (fused.numpy(), positions.to(torch.int32).numpy())]
    library["rope"](*inputs, *outputs, 1)
    return torch.from_numpy(outputs[0].numpy().copy())


@pytest.mark.parametrize("scale", [1.0, 24 / 72], ids=["window", "global"])
def test_axial_rope_is_tvms_rope_along_each_axis(sam3, scale):
    """Up to the rounding of the angles, which TVM computes in another order than upstream."""
    side = 12
    torch.manual_seed(0)
    q = torch.randn(1, 3, side * side, 2 * HALF)
    table = sam3.tracker_rope.compute_axial_cis(2 * HALF, side, side, scale_pos=scale)
    expected, _ = sam3.tracker_rope.apply_rotary_enc(q, q, table)
    token = torch.arange(side * side)
    halves = [
        tvms_own(half.transpose(0, 1).contiguous(), positions, scale)
        for half, positions in zip(q[0].split(HALF, dim=-1), (token % side, token // side), strict=True)
    ]
    actual = torch.cat(halves, dim=-1).transpose(0, 1)
    assert bool(((actual - expected[0]).abs() <= (4 * scale * side + 4) * EPS * q[0].abs().max()).all())


@pytest.mark.parametrize("scale", [1.0, 24 / 72], ids=["window", "global"])
def test_tvms_own_tables_are_not_within_one_ulp(scale):
    """Why the strategy reads them from upstream's table. If this fails, TVM's function can be used as it is."""
    unit = torch.tensor([1.0, 0.0]).repeat(SIDE, 1, HALF // 2)
    shown = tvms_own(unit, torch.arange(SIDE), scale)[:, 0].double()
    frequencies = 1.0 / (THETA ** (torch.arange(0, 2 * HALF, 4).float() / (2 * HALF)))
    angle = torch.outer(torch.arange(SIDE).float() * scale, frequencies).double()
    expected = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(-2)
    ulp = torch.ldexp(torch.ones_like(expected), torch.frexp(expected.abs()).exponent.clamp(min=-125) - 24)
    assert ((shown - expected).abs() / ulp).max() > 4
