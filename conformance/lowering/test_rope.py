"""Rotary position encoding: the real form is upstream's complex one, and is a rotation.

Every tolerance is a rounding bound. With u = eps/2, each of the two forms computes re·cos − im·sin with two rounded
products (or one, when fused) and one rounded difference: an error of at most 2u(|re·cos| + |im·sin|) ≤ eps·|z|, where
|z| is the length of the pair. Two forms differ by twice that; a result stored in half precision adds one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.examples import examples
from conformance.support.rotations import Axial, axial_draws, lengths
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.rope.real import axial_tables, real_tables, rotate
from harness.models.sam3.upstream import upstream

pytestmark = pytest.mark.law


@pytest.fixture(scope="module")
def sam3():
    """The upstream modules with RoPE inside."""
    with upstream():
        import sam3.model.vitdet as trunk
        import sam3.sam.rope as tracker_rope
        import sam3.sam.transformer as tracker

        yield SimpleNamespace(trunk=trunk, tracker=tracker, tracker_rope=tracker_rope)


@dataclass(frozen=True)
class Setting(Axial):
    """One draw of everything that RoPE depends on."""

    repeat: int
    seed: int

    def tokens(self, repeat: int = 1, salt: int = 0) -> torch.Tensor:
        """Queries or keys, [batch, heads, repeat·width·height, head_size], of many magnitudes."""
        generator = torch.Generator().manual_seed(2 * self.seed + salt)
        shape = (self.batch, self.heads, repeat * self.width * self.height, self.head_size)
        spread = torch.exp(torch.randn(shape, generator=generator, dtype=torch.float64))
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(self.dtype)


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def any_setting(dtypes: tuple[torch.dtype, ...] = DTYPES) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        **axial_draws(quarters=24, side=9, batch=3),
        repeat=st.integers(1, 4),
        dtype=st.sampled_from(dtypes),
        seed=st.integers(0, 2**20),
    )


def assert_rounding_apart(actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, working_eps: float) -> None:
    """Equal up to the rounding of two products and a sum in either form, and of the store in the dtype of `x`."""
    assert actual.dtype == x.dtype
    assert actual.shape == expected.shape == x.shape
    stored = torch.finfo(x.dtype)
    step = stored.eps if stored.eps > working_eps else 0.0
    bound = (2 * working_eps * (1 + working_eps) + step) * lengths(x) + stored.smallest_normal * stored.eps
    error = (actual.double() - expected.double()).abs()
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.3g} times the rounding bound"


@given(any_setting())
def test_real_is_upstreams_complex_rope(sam3, setting):
    """Trunk and tracker, queries and repeated keys, every dtype."""
    q, k = setting.tokens(), setting.tokens(setting.repeat, salt=1)
    eps = torch.finfo(torch.float32).eps
    for source in (sam3.trunk, sam3.tracker_rope):
        table = source.compute_axial_cis(**setting.axial)
        # upstream's float() also rounds float64 inputs, by eps/2 of each part
        input_rounding = 1.5 if setting.dtype == torch.float64 else 1.0
        q_complex, k_complex = source.apply_rotary_enc(q, k, table, repeat_freqs_k=True)
        cos, sin = real_tables(table)
        assert_rounding_apart(rotate(q, cos, sin), q_complex, q, eps * input_rounding)
        assert_rounding_apart(rotate(k, cos, sin, setting.repeat), k_complex, k, eps * input_rounding)


@given(any_setting((torch.float16, torch.bfloat16, torch.float32)))
def test_real_is_bitwise_upstreams_own_real_form(sam3, setting):
    """`sam3.sam.rope.apply_rotary_enc_real`, an independent reference, in the same order of arithmetic."""
    q, k = setting.tokens(), setting.tokens(setting.repeat, salt=1)
    table = sam3.tracker_rope.compute_axial_cis(**setting.axial)
    cos, sin = real_tables(table)
    q_real, k_real = sam3.tracker_rope.apply_rotary_enc_real(q, k, table.real, table.imag, repeat_freqs_k=True)
    assert torch.equal(rotate(q, cos, sin), q_real)
    assert torch.equal(rotate(k, cos, sin, setting.repeat), k_real)


@given(any_setting((torch.float64,)))
def test_float64_is_computed_in_float64(sam3, setting):
    """Against complex128 multiplication, where upstream itself would fall back to float32."""
    x = setting.tokens()
    table = sam3.trunk.compute_axial_cis(**setting.axial)
    product = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table.to(torch.complex128)
    expected = torch.view_as_real(product).flatten(-2)
    assert_rounding_apart(rotate(x, *real_tables(table)), expected, x, torch.finfo(torch.float64).eps)


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


@given(any_setting(), st.booleans())
def test_empty_keys_pass_through(sam3, setting, repeated):
    """Upstream drops all keys in training; the queries are rotated all the same."""
    q = setting.tokens()
    k = q[:, :, :0]
    table = sam3.tracker_rope.compute_axial_cis(**setting.axial)
    q_complex, k_complex = sam3.tracker_rope.apply_rotary_enc(q, k, table, repeat_freqs_k=repeated)
    cos, sin = real_tables(table)
    assert_rounding_apart(rotate(q, cos, sin), q_complex, q, 1.5 * torch.finfo(torch.float32).eps)
    rotated = rotate(k, cos, sin, setting.repeat)
    assert rotated.shape == k_complex.shape == k.shape
    assert rotated.dtype == k_complex.dtype


@given(any_setting())
def test_repetition_is_the_rotation_of_every_part(setting):
    k = setting.tokens(setting.repeat)
    cos, sin = axial_tables(setting.head_size, setting.width, setting.height)
    parts = [rotate(part, cos, sin) for part in k.chunk(setting.repeat, dim=-2)]
    assert torch.equal(rotate(k, cos, sin, setting.repeat), torch.cat(parts, dim=-2))


@given(any_setting((torch.float32, torch.float64)))
def test_rotation_keeps_the_length_of_every_pair(setting):
    """cos² + sin² is 1 within eps, and the rotation of the pair is exact to eps·|z| in each part."""
    x = setting.tokens()
    cos, sin = axial_tables(
        setting.head_size,
        setting.width,
        setting.height,
        setting.theta,
        setting.scale,
        setting.offset,
        dtype=setting.dtype,
    )
    drift = (lengths(rotate(x, cos, sin)) - lengths(x)).abs()
    assert bool((drift <= 3 * torch.finfo(setting.dtype).eps * lengths(x)).all())


@given(any_setting((torch.float64,)), st.floats(-3, 3), st.floats(-3, 3))
def test_rotations_compose(setting, a, b):
    """R(a)·R(b) = R(a+b): scaling all positions by a, then by b, is scaling them by a + b."""
    x = setting.tokens()
    grid = (setting.head_size, setting.width, setting.height, setting.theta)
    eps = torch.finfo(torch.float64).eps
    first, second, both = (axial_tables(*grid, scale=s, dtype=torch.float64) for s in (a, b, a + b))
    twice = rotate(rotate(x, *first), *second)
    # angles reach (|a|+|b|)·max(w, h), each rounded three times; then three rotations of eps·|z| each
    largest_angle = (abs(a) + abs(b)) * max(setting.width, setting.height)
    bound = (3 * largest_angle + 6) * eps * lengths(x)
    assert bool(((twice - rotate(x, *both)).abs() <= bound).all())


@given(any_setting())
def test_rotation_by_zero_is_the_identity(setting):
    x = setting.tokens()
    tables = axial_tables(setting.head_size, setting.width, setting.height, scale=0.0, offset=0.0)
    assert torch.equal(rotate(x, *tables), x)


@given(any_setting((torch.float64,)), st.floats(-50, 50))
def test_only_relative_positions_matter(setting, shift):
    """Attention scores do not change when every position moves by the same offset."""
    q, k = setting.tokens(), setting.tokens(salt=1)
    grid = (setting.head_size, setting.width, setting.height, setting.theta, setting.scale)

    def scores(offset: float) -> torch.Tensor:
        tables = axial_tables(*grid, offset=offset, dtype=torch.float64)
        return rotate(q, *tables) @ rotate(k, *tables).mT

    eps = torch.finfo(torch.float64).eps
    largest_angle = abs(shift) + setting.scale * max(setting.width, setting.height)
    products = q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :]
    bound = (4 * largest_angle + 8 + setting.head_size) * eps * products
    assert bool(((scores(shift) - scores(0.0)).abs() <= bound).all())


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


# (table side, query side, memories, keys without RoPE); the last two have another size than the table's
TRACKER_SHAPES = [(4, 4, 1, 0), (4, 4, 3, 0), (4, 4, 3, 5), (4, 3, 2, 1), (2, 5, 1, 0)]


@pytest.mark.parametrize("shape", TRACKER_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@torch.no_grad()
def test_tracker_attention_with_real_rope_is_upstreams(sam3, shape, dtype):
    """Sums of up to 80 keys and of 32 features may be rounded in another order: 32 eps of the largest value."""
    side, queries, memories, pointers = shape
    attention = tracker_attention(sam3, side, repeat=memories > 1).to(dtype)
    q = torch.randn(2, queries**2, 32, dtype=dtype)
    k = torch.randn(2, memories * queries**2 + pointers, 32, dtype=dtype)
    with STRATEGIES["real"].apply(attention):
        actual = attention(q, k, k, num_k_exclude_rope=pointers)
    expected = attention(q, k, k, num_k_exclude_rope=pointers)
    eps = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=32 * eps * expected.abs().max().item())


@pytest.mark.parametrize("pretrained", [6, 2], ids=["window", "global"])
@pytest.mark.parametrize("cls_token", [False, True], ids=["grid", "cls"])
@torch.no_grad()
def test_trunk_attention_with_real_rope_is_upstreams(sam3, pretrained, cls_token):
    attention = trunk_attention(sam3, 6, pretrained, cls_token)
    x = torch.randn(2, 37, 32) if cls_token else torch.randn(2, 6, 6, 32)
    with STRATEGIES["real"].apply(attention):
        actual = attention(x)
    expected = attention(x)
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(actual, expected, rtol=0, atol=32 * eps * expected.abs().max().item())


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


def test_real_leaves_nothing_complex_in_the_exported_program(sam3):
    for module, args in exported_attentions(sam3):
        with STRATEGIES["real"].apply(module):
            assert complex_values(module, args) == []


def test_none_is_the_control_with_complex_values_in_the_exported_program(sam3):
    for module, args in exported_attentions(sam3):
        with STRATEGIES["none"].apply(module):
            assert complex_values(module, args) != []


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


@examples(10)
@given(any_setting((torch.float64,)))
def test_a_wrong_sign_would_be_caught(setting):
    """The bound is tight enough: rotating the other way is outside it wherever there is anything to rotate."""
    x = setting.tokens()
    cos, sin = axial_tables(setting.head_size, setting.width, setting.height, setting.theta, 1.0, 1)
    with pytest.raises(AssertionError, match="times the rounding bound"):
        assert_rounding_apart(rotate(x, cos, -sin), rotate(x, cos, sin), x, torch.finfo(torch.float64).eps)
