"""Every strategy but `none`, in PyTorch and after TVM, against upstream's complex RoPE and against what RoPE promises.

A strategy is only ever used as the pipeline uses it: apply, export, import. Its rotation is observed through upstream's
own `Attention._apply_rope`, whose table may be any; one program holds all the rotations that a law needs.

Bounds are rounding bounds. Upstream computes in float32, eps = 2⁻²³, and casts back; `length` is that of the pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.frontend import export_program
from harness.frontend.running import run_module
from harness.model.upstream import upstream
from harness.rope import STRATEGIES, Strategy

EPS = torch.finfo(torch.float32).eps
HALVES = (torch.float16, torch.bfloat16)

Run = Callable[..., list[torch.Tensor]]
"""Takes what the module takes, returns its outputs as a list."""

PROMISED = [strategy for name, strategy in STRATEGIES.items() if name != "none"]

every_strategy = pytest.mark.parametrize("strategy", PROMISED, ids=lambda strategy: strategy.name)
both_places = pytest.mark.parametrize("place", ["pytorch", "tvm"])


@pytest.fixture(scope="module")
def sam3():
    """The upstream modules with RoPE inside."""
    with upstream():
        import sam3.model.vitdet as trunk
        import sam3.sam.rope as tracker_rope
        import sam3.sam.transformer as tracker

        yield SimpleNamespace(trunk=trunk, tracker=tracker, tracker_rope=tracker_rope)


def in_pytorch(strategy: Strategy, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Run:
    """The program that the strategy hands to the importer, run by PyTorch."""
    with strategy.apply(module):
        program = strategy.transform(export_program(module, args)).module()
    return lambda *inputs: listed(program(*inputs))


def after_tvm(strategy: Strategy, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Run:
    """The imported and compiled program."""
    with strategy.apply(module):
        program = export_program(module, args)
    imported, parameters = strategy.import_program(program)
    return lambda *inputs: [
        torch.from_numpy(array.copy())
        for array in run_module(imported, [*(x.numpy() for x in inputs), *parameters.values()])
    ]


PLACES = {"pytorch": in_pytorch, "tvm": after_tvm}


def listed(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


@dataclass(frozen=True)
class Setting:
    """One draw of everything that RoPE depends on."""

    head_size: int
    width: int
    height: int
    theta: float
    scale: float
    offset: int
    batch: int
    heads: int
    dtype: torch.dtype
    exponent: int
    contiguous: bool
    seed: int

    @property
    def grid(self) -> dict:
        return {"dim": self.head_size, "end_x": self.width, "end_y": self.height, "theta": self.theta}

    def tokens(self, salt: int) -> torch.Tensor:
        """Queries or keys, [batch, heads, tokens, head_size], as float32 or float64 values that the dtype can hold."""
        generator = torch.Generator().manual_seed(2 * self.seed + salt)
        shape = (self.batch, self.heads, self.width * self.height, self.head_size)
        # half precision holds no 1e30
        size = 10.0 ** (self.exponent / 10 if self.dtype in HALVES else self.exponent)
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * size
        return values.to(self.dtype).to(self.outside)

    @property
    def outside(self) -> torch.dtype:
        """NumPy has no bfloat16: half precision goes in and out as float32, and is cast inside the program."""
        return torch.float32 if self.dtype in HALVES else self.dtype


def any_setting() -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        head_size=st.integers(1, 16).map(lambda quarter: 4 * quarter),
        width=st.integers(1, 7),
        height=st.integers(1, 7),
        theta=st.sampled_from((2.0, 100.0, 10000.0, 500000.0)),
        scale=st.sampled_from((24 / 72, 0.5, 1.0, 2.0)),
        offset=st.integers(-3, 100),
        batch=st.integers(1, 2),
        heads=st.integers(1, 3),
        dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32)),
        exponent=st.integers(-30, 30),
        contiguous=st.booleans(),
        seed=st.integers(0, 2**20),
    )


class Rotations(torch.nn.Module):
    """One attention module for each table, and what the laws compare: see `check`."""

    def __init__(self, sam3: SimpleNamespace, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

        def rotation(scale: float, offset: float) -> torch.nn.Module:
            attention = sam3.trunk.Attention(setting.head_size, 1, use_rope=True, input_size=(1, 1))
            attention.freqs_cis = sam3.trunk.compute_axial_cis(**setting.grid, scale_pos=scale, offset=offset)
            return attention

        self.once = rotation(setting.scale, setting.offset)
        self.again = rotation(1.0, 0)
        self.both = rotation(setting.scale + 1.0, setting.offset)
        self.zero = rotation(0.0, 0)
        self.moved = rotation(setting.scale, setting.offset + 5)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.setting.contiguous:  # as the model has them: heads after tokens
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        q, k = q.to(self.setting.dtype), k.to(self.setting.dtype)
        once = self.once._apply_rope(q, k)
        twice, _ = self.again._apply_rope(*once)
        both, _ = self.both._apply_rope(q, k)
        zero, _ = self.zero._apply_rope(q, k)
        moved = self.moved._apply_rope(q, k)
        return tuple(x.to(self.setting.outside) for x in (*once, twice, both, zero, *moved))


def pairs(x: torch.Tensor) -> torch.Tensor:
    return x.double().unflatten(-1, (-1, 2))


def lengths(x: torch.Tensor) -> torch.Tensor:
    """|z| of the pair that each feature belongs to, float64, shape of `x`."""
    return pairs(x).norm(dim=-1, keepdim=True).expand_as(pairs(x)).flatten(-2)


def ulp(x: torch.Tensor) -> torch.Tensor:
    """The distance of float32 numbers at |x|, for float64 values."""
    exponent = torch.frexp(x.abs()).exponent.clamp(min=-125)
    return torch.ldexp(torch.ones_like(x), exponent - 24)


def check(sam3: SimpleNamespace, setting: Setting, run: Run) -> None:
    """Upstream's values, and the laws."""
    q, k = setting.tokens(0), setting.tokens(1)
    rotations = Rotations(sam3, setting)
    table = rotations.once.freqs_cis
    q_once, k_once, twice, both, zero, *moved = run(q, k)
    # storing a result in half precision rounds it, and may make it subnormal
    kept = torch.finfo(setting.dtype)
    step, least = (kept.eps, kept.smallest_normal * kept.eps) if setting.dtype in HALVES else (0.0, 2.0**-149)

    def close(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
        assert actual.shape == expected.shape
        error, bound = (actual.double() - expected.double()).abs(), bound + 2 * least
        assert bool((error <= bound).all()), f"{what}: {(error / bound).max().item():.3g} times the bound"

    for x, actual in ((q, q_once), (k, k_once)):
        # 2 ULP of the larger product of each part, with the tables as they are
        (re, im), (cos, sin) = pairs(rounded_like(x, actual)).unbind(-1), (table.real.double(), table.imag.double())
        exact = torch.stack((re * cos - im * sin, re * sin + im * cos), -1).flatten(-2)
        larger = torch.stack(
            (torch.maximum((re * cos).abs(), (im * sin).abs()), torch.maximum((re * sin).abs(), (im * cos).abs())), -1
        ).flatten(-2)
        close(actual, exact, 2 * ulp(larger) + step * exact.abs() + 2 * EPS**2 * larger, "2 ULP")
        close(lengths(actual), lengths(x), (3 * EPS + 2 * step) * lengths(x), "norm")

    inside = tuple(x.to(setting.dtype) for x in (q, k))
    for upstreams in (
        sam3.trunk.apply_rotary_enc(*inside, table),
        sam3.tracker_rope.apply_rotary_enc(*inside, table),
        sam3.tracker_rope.apply_rotary_enc_real(*inside, table.real, table.imag),
    ):
        for x, actual, expected in zip((q, k), (q_once, k_once), upstreams, strict=True):
            close(actual, expected, (3 * EPS + step) * lengths(x), "upstream")

    assert torch.equal(zero, rounded_like(q, zero)), "rotation by zero"
    # every angle is rounded three times, every rotation moves the pair by no more than 3 eps
    furthest = (setting.scale + 1) * max(setting.width, setting.height) + abs(setting.offset) + 5
    rounding = 3 * furthest * EPS + 9 * EPS + 3 * step
    close(twice, both, rounding * lengths(q), "composition")
    here, there = (a.double() @ b.double().mT for a, b in ((q_once, k_once), tuple(moved)))
    sizes = q.double().norm(dim=-1)[..., :, None] * k.double().norm(dim=-1)[..., None, :]
    close(here, there, 2 * rounding * sizes, "relative positions")


def rounded_like(x: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """The input that was rotated: upstream rounds float64 to float32 first, the strategy `real` does not."""
    return x.to(torch.float32).to(x.dtype) if torch.equal(actual, actual.float().to(actual.dtype)) else x


@every_strategy
@settings(max_examples=6)
@given(setting=any_setting())
def test_rotations_in_pytorch(sam3, strategy: Strategy, setting: Setting) -> None:
    rotations = Rotations(sam3, setting)
    check(sam3, setting, in_pytorch(strategy, rotations, (setting.tokens(0), setting.tokens(1))))


@every_strategy
@settings(max_examples=3)
@given(setting=any_setting())
def test_rotations_after_tvm(sam3, strategy: Strategy, setting: Setting) -> None:
    rotations = Rotations(sam3, setting)
    check(sam3, setting, after_tvm(strategy, rotations, (setting.tokens(0), setting.tokens(1))))


def angles(sam3: SimpleNamespace, setting: Setting) -> torch.Tensor:
    """Upstream's float32 angles, [tokens, head_size / 2]; the table is their cosines and sines."""
    frequencies = 1.0 / (setting.theta ** (torch.arange(0, setting.head_size, 4).float() / setting.head_size))
    axes = sam3.tracker_rope.init_t_xy(setting.width, setting.height, setting.scale, setting.offset)
    return torch.cat([torch.outer(axis, frequencies) for axis in axes], dim=-1)


WINDOW = Setting(64, 24, 24, 10000.0, 1.0, 0, 1, 1, torch.float32, 0, True, 0)
GLOBAL = Setting(64, 72, 72, 10000.0, 24 / 72, 0, 1, 1, torch.float32, 0, True, 0)


@every_strategy
@both_places
@pytest.mark.parametrize("setting", [WINDOW, GLOBAL], ids=["window", "global"])
def test_tables_are_within_one_ulp(sam3, strategy: Strategy, place: str, setting: Setting) -> None:
    """Rotating (1, 0) shows cosine and sine as the program holds them, at full size."""
    unit = torch.tensor([1.0, 0.0]).repeat(setting.width * setting.height, setting.head_size // 2)[None, None]
    module = OneRotation(sam3, setting)
    (shown, _) = PLACES[place](strategy, module, (unit, unit))(unit, unit)
    angle = angles(sam3, setting).double()
    exact = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(-2)
    assert bool(((shown.double() - exact).abs() <= ulp(exact)).all())


class OneRotation(torch.nn.Module):
    """Upstream's rotation with one table."""

    def __init__(self, sam3: SimpleNamespace, setting: Setting) -> None:
        super().__init__()
        self.attention = sam3.trunk.Attention(setting.head_size, 1, use_rope=True, input_size=(1, 1))
        self.attention.freqs_cis = sam3.trunk.compute_axial_cis(
            **setting.grid, scale_pos=setting.scale, offset=setting.offset
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated: tuple[torch.Tensor, torch.Tensor] = self.attention._apply_rope(q, k)
        return rotated


class Polar(torch.nn.Module):
    def forward(self, angle: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.polar(torch.ones_like(angle), angle))


@pytest.mark.parametrize("name", ["lowering", "converter"])
def test_tables_computed_in_the_graph_are_within_one_ulp(sam3, name: str) -> None:
    angle = angles(sam3, GLOBAL)
    (table,) = after_tvm(STRATEGIES[name], Polar(), (angle,))(angle)
    exact = torch.stack((angle.double().cos(), angle.double().sin()), dim=-1)
    assert bool(((table.double() - exact).abs() <= ulp(exact)).all())


@every_strategy
@both_places
def test_empty_keys_pass_through(sam3, strategy: Strategy, place: str) -> None:
    """Upstream drops all keys in training; the queries are rotated all the same."""
    q = WINDOW.tokens(0)
    k = q[:, :, :0]
    module = OneRotation(sam3, WINDOW)
    expected, _ = sam3.trunk.apply_rotary_enc(q, k, module.attention.freqs_cis)
    rotated, kept = PLACES[place](strategy, module, (q, k))(q, k)
    assert kept.shape == k.shape and kept.dtype == k.dtype
    assert bool(((rotated - expected).abs() <= 3 * EPS * lengths(q)).all())


def trunk_attention(sam3, pretrained: int, cls_token: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return sam3.trunk.Attention(
        32,
        4,
        use_rope=True,
        input_size=(6, 6),
        rope_pt_size=(pretrained, pretrained),
        rope_interp=True,
        cls_token=cls_token,
    ).eval()


def assert_attention(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of up to 80 keys and of 32 features may be rounded in another order: 32 eps of the largest value."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=32 * EPS * expected.abs().max().item())


@every_strategy
@pytest.mark.parametrize(
    ("place", "pretrained", "cls_token"),
    [("pytorch", 6, False), ("pytorch", 2, True), ("tvm", 6, True), ("tvm", 2, False)],
    ids=["pytorch-window", "pytorch-global-cls", "tvm-window-cls", "tvm-global"],
)
@torch.no_grad()
def test_trunk_attention(sam3, strategy: Strategy, place: str, pretrained: int, cls_token: bool) -> None:
    attention = trunk_attention(sam3, pretrained, cls_token)
    x = torch.randn(2, 37, 32) if cls_token else torch.randn(2, 6, 6, 32)
    (actual,) = PLACES[place](strategy, attention, (x,))(x)
    assert_attention(actual, attention(x))


class Tracked(torch.nn.Module):
    """The tracker's attention with its last keys left without rotation."""

    def __init__(self, attention: torch.nn.Module, pointers: int) -> None:
        super().__init__()
        self.attention, self.pointers = attention, pointers

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rotated: torch.Tensor = self.attention(q, k, k, num_k_exclude_rope=self.pointers)
        return rotated


# table side, query side, memories, keys without RoPE, dtype; where the sides differ, forward computes the table again
TRACKER = [
    ("pytorch", 4, 4, 1, 0, torch.float64),
    ("pytorch", 2, 5, 1, 0, torch.float32),
    ("tvm", 4, 4, 3, 5, torch.float64),
    ("tvm", 4, 3, 2, 1, torch.float32),
]


@every_strategy
@pytest.mark.parametrize("shape", TRACKER, ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
@torch.no_grad()
def test_tracker_attention(sam3, strategy: Strategy, shape: tuple) -> None:
    place, side, queries, memories, pointers, dtype = shape

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        attention = sam3.tracker.RoPEAttention(32, 2, rope_k_repeat=memories > 1, feat_sizes=(side, side))
        return Tracked(attention.to(dtype).eval(), pointers)

    q = torch.randn(2, queries**2, 32, dtype=dtype)
    k = torch.randn(2, memories * queries**2 + pointers, 32, dtype=dtype)
    # upstream keeps the recomputed table on the module, so each run has a module of its own
    (actual,) = PLACES[place](strategy, make(), (q, k))(q, k)
    assert_attention(actual, make()(q, k))


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other way": lambda table: table.conj(),
    "next token": lambda table: table.roll(1, 0),
    "axes swapped": lambda table: table.roll(table.shape[1] // 2, 1),
    "pairs reversed": lambda table: table.flip(1),
    "half precision": lambda table: torch.view_as_complex(torch.view_as_real(table).half().float()),
    "four units too long": lambda table: table * (1 + 4 * EPS),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_wrong_table_is_caught(sam3, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    setting = Setting(16, 5, 3, 10000.0, 0.5, 2, 1, 2, torch.float32, 0, True, 0)
    rotations = Rotations(sam3, setting)
    check(sam3, setting, lambda q, k: listed(rotations(q, k)))
    for attention in rotations.children():
        attention.freqs_cis = fault(attention.freqs_cis)
    with pytest.raises(AssertionError):
        check(sam3, setting, lambda q, k: listed(rotations(q, k)))
