"""Rotary position encoding: the real form is upstream's complex one, and is a rotation.

Every tolerance is a rounding bound. With u = eps/2, each of the two forms computes re·cos − im·sin with two rounded
products (or one, when fused) and one rounded difference: an error of at most 2u(|re·cos| + |im·sin|) ≤ eps·|z|, where
|z| is the length of the pair. Two forms differ by twice that; a result stored in half precision adds one step.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.rotations import Rotations, Setting, any_setting, check, lengths
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.rope.real import axial_tables, real_tables, rotate

pytestmark = pytest.mark.law


def tokens(setting: Setting, salt: int = 0, repeat: int = 1) -> torch.Tensor:
    """Queries or keys, [batch, heads, repeat·width·height, head_size]."""
    return setting.tokens(salt, repeat).to(setting.dtype)


@given(any_setting())
def test_real_is_upstreams_complex_rope_and_keeps_its_laws(sam3, setting):
    """Trunk and tracker, upstream's complex and real forms, every dtype: `rotations.check`."""
    rotations = Rotations(sam3, setting)
    with STRATEGIES["real"].apply(rotations):
        check(sam3, setting, rotations(setting.tokens(0), setting.tokens(1)))


@given(any_setting(torch.float16, torch.bfloat16, torch.float32), st.integers(1, 4))
def test_real_is_bitwise_upstreams_own_real_form(sam3, setting, repeat):
    """`sam3.sam.rope.apply_rotary_enc_real`, an independent reference, in the same order of arithmetic."""
    q, k = tokens(setting), tokens(setting, 1, repeat)
    table = sam3.tracker_rope.compute_axial_cis(**setting.axial)
    cos, sin = real_tables(table)
    q_real, k_real = sam3.tracker_rope.apply_rotary_enc_real(q, k, table.real, table.imag, repeat_freqs_k=True)
    assert torch.equal(rotate(q, cos, sin), q_real)
    assert torch.equal(rotate(k, cos, sin, repeat), k_real)


@given(any_setting(torch.float64), st.integers(1, 4))
def test_float64_is_computed_in_float64(sam3, setting, repeat):
    """Against complex128 multiplication, where upstream itself would fall back to float32."""
    x = tokens(setting, repeat=repeat)
    table = sam3.trunk.compute_axial_cis(**setting.axial)
    product = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table.to(torch.complex128).repeat(repeat, 1)
    actual, expected = rotate(x, *real_tables(table), repeat), torch.view_as_real(product).flatten(-2)
    assert actual.dtype == x.dtype and actual.shape == x.shape
    kind = torch.finfo(torch.float64)
    bound = 2 * kind.eps * (1 + kind.eps) * lengths(x) + kind.smallest_normal * kind.eps
    assert bool(((actual - expected).abs() <= bound).all())


@given(any_setting())
def test_axial_tables_are_upstreams(sam3, setting):
    """The angles are computed by the same formula; cosine and sine may be rounded differently."""
    cos, sin = axial_tables(
        setting.head_size, setting.width, setting.height, setting.theta, setting.scale, setting.offset
    )
    for source in (sam3.trunk, sam3.tracker_rope):
        table = source.compute_axial_cis(**setting.axial)
        assert cos.dtype == torch.float32 and cos.shape == table.shape
        torch.testing.assert_close(cos, table.real, rtol=0, atol=2 * torch.finfo(torch.float32).eps)
        torch.testing.assert_close(sin, table.imag, rtol=0, atol=2 * torch.finfo(torch.float32).eps)


@given(any_setting(torch.float64), st.floats(-3, 3), st.floats(-3, 3))
def test_rotations_by_tables_in_float64_compose(setting, a, b):
    """R(a)·R(b) = R(a+b): scaling all positions by a, then by b, is scaling them by a + b."""
    x = tokens(setting)
    grid = (setting.head_size, setting.width, setting.height, setting.theta)
    eps = torch.finfo(torch.float64).eps
    first, second, both = (axial_tables(*grid, scale=s, dtype=torch.float64) for s in (a, b, a + b))
    twice = rotate(rotate(x, *first), *second)
    # angles reach (|a|+|b|)·max(w, h), each rounded three times; then three rotations of eps·|z| each
    largest_angle = (abs(a) + abs(b)) * max(setting.width, setting.height)
    bound = (3 * largest_angle + 6) * eps * lengths(x)
    assert bool(((twice - rotate(x, *both)).abs() <= bound).all())


@pytest.mark.parametrize(
    ("tokens", "features", "repeat"),
    [(5, 8, 1), (6, 4, 1), (6, 8, 2), (13, 8, 2)],
    ids=["length", "width", "few", "odd"],
)
def test_a_table_that_does_not_fit_is_refused(tokens, features, repeat):
    cos, sin = axial_tables(8, 3, 2)
    with pytest.raises(ValueError, match="does not fit"):
        rotate(torch.zeros(1, 1, tokens, features), cos, sin, repeat)


def trunk_attention(sam3, side: int, pretrained: int, cls_token: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    return sam3.trunk.Attention(
        32,
        4,
        use_rope=True,
        input_size=(side, side),
        rope_pt_size=(pretrained, pretrained),
        rope_interp=True,
        cls_token=cls_token,
    ).eval()


def tracker_attention(sam3, side: int, repeat: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return sam3.tracker.RoPEAttention(32, 2, rope_k_repeat=repeat, feat_sizes=(side, side)).eval()


@pytest.mark.parametrize("shape", [(4, 4, 1, 0), (4, 4, 3, 5), (4, 3, 2, 1)], ids=str)
@torch.no_grad()
def test_the_trackers_attention_in_bfloat16_is_upstreams(sam3, shape):
    """Sums may be rounded in another order; `test_rope_strategies.py` holds float32 and float64, and the trunk's."""
    side, queries, memories, pointers = shape
    attention = tracker_attention(sam3, side, repeat=memories > 1).bfloat16()
    q = torch.randn(2, queries**2, 32).bfloat16()
    k = torch.randn(2, memories * queries**2 + pointers, 32).bfloat16()
    with STRATEGIES["real"].apply(attention):
        actual = attention(q, k, k, num_k_exclude_rope=pointers)
    expected = attention(q, k, k, num_k_exclude_rope=pointers)
    bound = 32 * torch.finfo(torch.bfloat16).eps * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


def complex_values(module: torch.nn.Module, args: tuple) -> list[str]:
    """Names of the complex tensors in the exported program: values, buffers and constants."""
    with torch.no_grad():
        program = torch.export.export(module, args, strict=False)
    values = [
        node.name
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_complex()
    ]
    held = {**program.state_dict, **program.constants}
    return values + [name for name, value in held.items() if isinstance(value, torch.Tensor) and value.is_complex()]


def exported_attentions(sam3) -> list[tuple[torch.nn.Module, tuple]]:
    x = torch.randn(1, 6, 6, 32)
    q, k = torch.randn(1, 16, 32), torch.randn(1, 50, 32)
    return [(trunk_attention(sam3, 6, 2), (x,)), (tracker_attention(sam3, 4, repeat=True), (q, k, k, 2))]


@pytest.mark.parametrize(("strategy", "complex_remain"), [("real", False), ("none", True)])
def test_complex_values_in_the_exported_program(sam3, strategy, complex_remain):
    for module, args in exported_attentions(sam3):
        with STRATEGIES[strategy].apply(module):
            assert (complex_values(module, args) != []) == complex_remain


def state(module: torch.nn.Module) -> list[tuple]:
    """Everything that a strategy could leave changed, in order."""
    return [(name, dict(part.__dict__), list(part._buffers.items())) for name, part in module.named_modules()]


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_everything_is_as_before_afterwards(sam3, strategy):
    module = torch.nn.ModuleList(
        [trunk_attention(sam3, 6, 2), tracker_attention(sam3, 4, repeat=True), trunk_attention(sam3, 4, 4)]
    )
    module[0].register_buffer("registered_later", torch.zeros(1))
    before = state(module)
    names = list(module.state_dict())
    with strategy.apply(module), strategy.apply(module):  # the second changes nothing more
        pass
    assert state(module) == before
    with pytest.raises(RuntimeError, match="in the middle"), strategy.apply(module):
        raise RuntimeError("in the middle")
    assert state(module) == before
    assert list(module.state_dict()) == names


def test_other_instances_are_untouched(sam3):
    changed, bystander = trunk_attention(sam3, 6, 2), trunk_attention(sam3, 6, 2)
    before = state(bystander)
    with STRATEGIES["real"].apply(changed):
        assert state(bystander) == before
        assert "freqs_cis" not in dict(changed.named_buffers())
