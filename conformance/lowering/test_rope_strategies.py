"""Every strategy but `none`, in PyTorch and after TVM, against upstream's complex RoPE and against what RoPE promises.

A strategy is only ever used as the pipeline uses it: apply, export, import. Its rotation is observed through upstream's
own `Attention._apply_rope`, whose table may be any; one program holds everything that a strategy is asked at one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from conformance.support.batches import UNOPTIMIZED, Part, drawn, listed, run_together
from conformance.support.rotations import EPS, Rotations, Setting, any_setting, check, lengths, ulp, upstream_table
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.running import run_module
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH
from harness.compiler.lowering.rope import STRATEGIES, Strategy

# torch.export's, where upstream keeps another table
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")

PROMISED = [strategy for name, strategy in STRATEGIES.items() if name != "none"]

every_strategy = pytest.mark.parametrize("strategy", PROMISED, ids=lambda strategy: strategy.name)
both_places = pytest.mark.parametrize("place", ["pytorch", "tvm"])


def in_pytorch(strategy: Strategy, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What PyTorch makes of the program that the strategy hands to the importer."""
    with strategy.apply(module):
        program = strategy.transform(export_program(module, inputs)).module()
    return listed(program(*inputs))


def after_tvm(strategy: Strategy, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What the imported and compiled program returns."""
    with strategy.apply(module):
        program = export_program(module, inputs)
    imported, parameters = TORCH.import_exported(program, strategy)
    arrays = run_module(imported, [*(x.numpy() for x in inputs), *parameters.values()], UNOPTIMIZED)
    return [torch.from_numpy(array.copy()) for array in arrays]


PLACES = {"pytorch": in_pytorch, "tvm": after_tvm}
EXAMPLES = {"pytorch": 6, "tvm": 3}
"""How many settings are drawn."""


@pytest.fixture(scope="module")
def outputs(sam3) -> Callable[[Strategy, str], dict[object, list[torch.Tensor]]]:
    """(strategy, place) → the outputs of every part that is asked of it there, by `Part.what`."""

    @cache
    def computed(name: str, place: str) -> dict[object, list[torch.Tensor]]:
        asked = parts(sam3, place)
        with torch.no_grad():
            found = run_together(lambda module, inputs: PLACES[place](STRATEGIES[name], module, inputs), asked)
        return {part.what: results for part, results in zip(asked, found, strict=True)}

    return lambda strategy, place: computed(strategy.name, place)


def parts(sam3: SimpleNamespace, place: str) -> list[Part]:
    """Drawn rotations, full tables, empty keys, and the attentions of trunk and tracker."""
    unit = {table: unit_pairs(table) for table in TABLES.values()}
    return [
        *(Part(s, Rotations(sam3, s), (s.tokens(0), s.tokens(1))) for s in drawn(any_setting(), EXAMPLES[place])),
        *(Part(("table", s), OneRotation(sam3, s), (unit[s], unit[s])) for s in TABLES.values()),
        Part("empty keys", OneRotation(sam3, WINDOW), (WINDOW.tokens(0), WINDOW.tokens(0)[:, :, :0])),
        *(Part(trunk, trunk.module(sam3), (trunk.tokens(),)) for trunk in TRUNK.values() if trunk.place == place),
        *(Part(tracked, tracked.module(sam3), tracked.tokens()) for tracked in TRACKER if tracked.place == place),
    ]


@every_strategy
@both_places
def test_rotations(sam3, outputs, strategy: Strategy, place: str) -> None:
    settings = [(what, results) for what, results in outputs(strategy, place).items() if isinstance(what, Setting)]
    assert len(settings) == EXAMPLES[place]
    for setting, results in settings:
        try:
            check(sam3, setting, results)
        except AssertionError as error:
            error.add_note(f"in {setting}")
            raise


def angles(sam3: SimpleNamespace, setting: Setting) -> torch.Tensor:
    """Upstream's float32 angles, [tokens, head_size / 2]; the table is their cosines and sines."""
    frequencies = 1.0 / (setting.theta ** (torch.arange(0, setting.head_size, 4).float() / setting.head_size))
    axes = sam3.tracker_rope.init_t_xy(setting.width, setting.height, setting.scale, setting.offset)
    return torch.cat([torch.outer(axis, frequencies) for axis in axes], dim=-1)


WINDOW = Setting(64, 24, 24, 10000.0, 1.0, 0, 1, 1, torch.float32, 0, True, 0)
GLOBAL = Setting(64, 72, 72, 10000.0, 24 / 72, 0, 1, 1, torch.float32, 0, True, 0)


TABLES = {"window": WINDOW, "global": GLOBAL}


def unit_pairs(setting: Setting) -> torch.Tensor:
    """(1, 0) for every pair of every token."""
    return torch.tensor([1.0, 0.0]).repeat(setting.width * setting.height, setting.head_size // 2)[None, None]


@every_strategy
@both_places
@pytest.mark.parametrize("setting", TABLES.values(), ids=TABLES)
def test_tables_are_within_one_ulp(sam3, outputs, strategy: Strategy, place: str, setting: Setting) -> None:
    """Rotating (1, 0) shows cosine and sine as the program holds them, at full size."""
    shown, _ = outputs(strategy, place)["table", setting]
    angle = angles(sam3, setting).double()
    exact = torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(-2)
    assert bool(((shown.double() - exact).abs() <= ulp(exact)).all())


class OneRotation(torch.nn.Module):
    """Upstream's rotation with one table."""

    def __init__(self, sam3: SimpleNamespace, setting: Setting) -> None:
        super().__init__()
        self.attention = sam3.trunk.Attention(setting.head_size, 1, use_rope=True, input_size=(1, 1))
        self.attention.freqs_cis = upstream_table(sam3, setting)

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated: tuple[torch.Tensor, torch.Tensor] = self.attention._apply_rope(q, k)
        return rotated


class Polar(torch.nn.Module):
    def forward(self, angle: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.polar(torch.ones_like(angle), angle))


@pytest.mark.parametrize("name", ["lowering", "converter"])
def test_tables_computed_in_the_graph_are_within_one_ulp(sam3, name: str) -> None:
    angle = angles(sam3, GLOBAL)
    (table,) = after_tvm(STRATEGIES[name], Polar(), (angle,))
    exact = torch.stack((angle.double().cos(), angle.double().sin()), dim=-1)
    assert bool(((table.double() - exact).abs() <= ulp(exact)).all())


@every_strategy
@both_places
def test_empty_keys_pass_through(sam3, outputs, strategy: Strategy, place: str) -> None:
    """Upstream drops all keys in training; the queries are rotated all the same."""
    q = WINDOW.tokens(0)
    k = q[:, :, :0]
    expected, _ = sam3.trunk.apply_rotary_enc(q, k, upstream_table(sam3, WINDOW))
    rotated, kept = outputs(strategy, place)["empty keys"]
    assert kept.shape == k.shape and kept.dtype == k.dtype
    assert bool(((rotated - expected).abs() <= 3 * EPS * lengths(q)).all())


@dataclass(frozen=True)
class Trunk:
    """The ViT's attention: where it is asked, from which grid its positions are interpolated, and the class token."""

    place: str
    pretrained: int
    cls_token: bool
    dtype: torch.dtype = torch.float32

    def module(self, sam3: SimpleNamespace) -> torch.nn.Module:
        """Its table stays complex64 in float64 too, as `.double()` leaves it."""
        torch.manual_seed(0)
        attention: torch.nn.Module = sam3.trunk.Attention(
            32,
            4,
            use_rope=True,
            input_size=(6, 6),
            rope_pt_size=(self.pretrained, self.pretrained),
            rope_interp=True,
            cls_token=self.cls_token,
        )
        return (attention.double() if self.dtype == torch.float64 else attention).eval()

    def tokens(self) -> torch.Tensor:
        shape = (2, 37, 32) if self.cls_token else (2, 6, 6, 32)
        return torch.randn(shape, dtype=self.dtype, generator=torch.Generator().manual_seed(1))


TRUNK = {
    "pytorch-window": Trunk("pytorch", 6, False),
    "pytorch-global-cls": Trunk("pytorch", 2, True),
    "pytorch-global-float64": Trunk("pytorch", 2, False, torch.float64),
    "tvm-window-cls": Trunk("tvm", 6, True),
    "tvm-global": Trunk("tvm", 2, False),
}


def assert_attention(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Sums of up to 80 keys and of 32 features may be rounded in another order: 32 eps of the largest value."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=32 * EPS * expected.abs().max().item())


@every_strategy
@pytest.mark.parametrize("trunk", TRUNK.values(), ids=TRUNK)
@torch.no_grad()
def test_trunk_attention(sam3, outputs, strategy: Strategy, trunk: Trunk) -> None:
    (actual,) = outputs(strategy, trunk.place)[trunk]
    assert_attention(actual, trunk.module(sam3)(trunk.tokens()))


class Tracked(torch.nn.Module):
    """The tracker's attention with its last keys left without rotation."""

    def __init__(self, attention: torch.nn.Module, pointers: int) -> None:
        super().__init__()
        self.attention, self.pointers = attention, pointers

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        rotated: torch.Tensor = self.attention(q, k, k, num_k_exclude_rope=self.pointers)
        return rotated


@dataclass(frozen=True)
class Tracker:
    """The tracker's attention; where the sides of table and queries differ, forward computes the table again."""

    place: str
    side: int
    queries: int
    memories: int
    pointers: int
    dtype: torch.dtype

    def module(self, sam3: SimpleNamespace) -> torch.nn.Module:
        """A new one each time: upstream keeps the recomputed table on the module."""
        torch.manual_seed(0)
        sizes = (self.side, self.side)
        attention = sam3.tracker.RoPEAttention(32, 2, rope_k_repeat=self.memories > 1, feat_sizes=sizes)
        return Tracked(attention.to(self.dtype).eval(), self.pointers)

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        counts = self.queries**2, self.memories * self.queries**2 + self.pointers
        q, k = (torch.randn(2, count, 32, dtype=self.dtype, generator=generator) for count in counts)
        return q, k


TRACKER = [
    Tracker("pytorch", 4, 4, 1, 0, torch.float64),
    Tracker("pytorch", 4, 4, 3, 0, torch.float32),
    Tracker("pytorch", 2, 5, 1, 0, torch.float32),
    Tracker("tvm", 4, 4, 3, 5, torch.float64),
    Tracker("tvm", 4, 3, 2, 1, torch.float32),
]


@every_strategy
@pytest.mark.parametrize(
    "tracker", TRACKER, ids=lambda t: f"{t.place}-{t.side}-{t.queries}-{t.memories}-{t.pointers}-{t.dtype}"
)
@torch.no_grad()
def test_tracker_attention(sam3, outputs, strategy: Strategy, tracker: Tracker) -> None:
    (actual,) = outputs(strategy, tracker.place)[tracker]
    assert_attention(actual, tracker.module(sam3)(*tracker.tokens()))


@pytest.mark.parametrize("tracker", [each for each in TRACKER if each.side != each.queries], ids=str)
@torch.no_grad()
def test_a_table_for_another_size_is_not_left_behind(sam3, tracker: Tracker) -> None:
    module = tracker.module(sam3)
    held = [dict(vars(inner)) for inner in module.modules()]
    in_pytorch(STRATEGIES["lowering"], module, tracker.tokens())
    assert [dict(vars(inner)) for inner in module.modules()] == held


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
    rotations, inputs = Rotations(sam3, setting), (setting.tokens(0), setting.tokens(1))
    check(sam3, setting, rotations(*inputs))
    for attention in rotations.children():
        attention.freqs_cis = fault(attention.freqs_cis)
    with pytest.raises(AssertionError):
        check(sam3, setting, rotations(*inputs))
