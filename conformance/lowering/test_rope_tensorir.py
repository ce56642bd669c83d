"""Strategy `tensorir`: its kernel is upstream's rotation, one operator in the graph, and no pass before attention.

In `test_rope_strategies.py` it is one among the others; here its kernel stands alone, as the CPU pipeline
compiles it, at every corner of what RoPE depends on.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import tvm

from conformance.support.batches import Part, drawn, listed, run_together
from conformance.support.kernels import functions_of
from conformance.support.rotations import EPS, HALVES, Rotations, Setting, any_setting, check, lengths, upstream_table
from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.rope.operators.rotate_pairs import rotate
from harness.compiler.schedules.common.kernel_info import info_of
from harness.compiler.schedules.cpu import cpu_pipeline
from harness.compiler.targets import TARGETS

TENSORIR = STRATEGIES["tensorir"]


PLAIN = Setting(16, 5, 3, 10000.0, 1.0, 0, 2, 3, torch.float32, 0, True, 1)
CORNERS = {
    "smallest head": replace(PLAIN, head_size=4),
    "head of 20": replace(PLAIN, head_size=20),
    "head of 68": replace(PLAIN, head_size=68),
    "wide": replace(PLAIN, width=7, height=1),
    "tall": replace(PLAIN, width=1, height=7),
    "one token": replace(PLAIN, width=1, height=1),
    "one of all": replace(PLAIN, head_size=4, width=1, height=1, batch=1, heads=1),
    "one batch, one head": replace(PLAIN, batch=1, heads=1),
    "scaled": replace(PLAIN, scale=24 / 72),
    "moved": replace(PLAIN, offset=100),
    "moved back": replace(PLAIN, offset=-3, scale=0.5),
    "fast": replace(PLAIN, theta=2.0),
    "slow": replace(PLAIN, theta=500000.0),
    "heads after tokens": replace(PLAIN, contiguous=False),
    "tiny": replace(PLAIN, exponent=-30),
    "huge": replace(PLAIN, exponent=30),
    "fp64": replace(PLAIN, dtype=torch.float64),
    "huge fp64": replace(PLAIN, dtype=torch.float64, exponent=30, contiguous=False),
    "fp16": replace(PLAIN, dtype=torch.float16),
    "small fp16": replace(PLAIN, dtype=torch.float16, exponent=-30, contiguous=False),
    "bf16": replace(PLAIN, dtype=torch.bfloat16),
    "large bf16": replace(PLAIN, dtype=torch.bfloat16, exponent=30, contiguous=False),
    **{f"drawn {n}": setting for n, setting in enumerate(drawn(any_setting(), 6))},
}
"""Everything that the kernel may depend on, one at a time and at random."""


@dataclass(frozen=True)
class Keys:
    """Keys that are `repeat` times the queries, or none."""

    setting: Setting
    repeat: int

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.setting.tokens(0), self.setting.tokens(1, self.repeat)


REPEATED = [
    Keys(replace(PLAIN, dtype=dtype, seed=repeat), repeat)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for repeat in (0, 2, 3)
]


class Alone(torch.nn.Module):
    """Queries and keys [B, heads, n·L, D], rotated by the operator in their own dtype."""

    def __init__(self, sam3, keys: Keys) -> None:
        super().__init__()
        table = upstream_table(sam3, keys.setting)
        self.register_buffer("rope_cos", table.real.clone())
        self.register_buffer("rope_sin", table.imag.clone())
        self.keys = keys

    def forward(self, *tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = (x.to(self.keys.setting.dtype) for x in tokens)
        tables = (self.rope_cos, self.rope_sin)
        return tuple(x.to(self.keys.setting.outside) for x in rotate(q, k, tables, max(self.keys.repeat, 1)))


def eager(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    with TENSORIR.apply(module):
        return listed(module(*inputs))


def compiled(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """By the CPU pipeline; every rotation is a call of the kernel, as nothing reads its results but the caller."""
    program, imported, arguments = prepared(module, inputs)
    assert any("rotate_pairs" in str(node.target) for node in program.graph.nodes)
    results, kernels = run_cpu(imported, arguments)
    assert any("rotate_pairs" in name for name in kernels) and "attention" not in kernels
    return [torch.from_numpy(result.numpy()) for result in results]


@pytest.fixture(scope="module", params=[eager, compiled], ids=["pytorch", "tvm"])
def rotated(sam3, request: pytest.FixtureRequest) -> dict[object, list[torch.Tensor]]:
    """What the kernel makes of every corner, all in one program."""
    parts = [Part(s, Rotations(sam3, s), (s.tokens(0), s.tokens(1))) for s in CORNERS.values()]
    parts += [Part(keys, Alone(sam3, keys), keys.tokens()) for keys in REPEATED]
    return dict(zip((part.what for part in parts), run_together(request.param, parts), strict=True))


@pytest.mark.parametrize("corner", CORNERS)
def test_the_kernel_is_upstreams_rotation_and_keeps_its_laws(sam3, rotated, corner: str) -> None:
    """In 2 ULP, and what RoPE promises; against upstream's complex and real forms: `rotations.check`."""
    check(sam3, CORNERS[corner], rotated[CORNERS[corner]])


@pytest.mark.parametrize("keys", REPEATED, ids=lambda keys: f"{keys.setting.dtype}-{keys.repeat}")
def test_keys_of_several_frames_and_no_keys(sam3, rotated, keys: Keys) -> None:
    table, dtype = upstream_table(sam3, keys.setting), keys.setting.dtype
    inside = tuple(x.to(dtype) for x in keys.tokens())
    references = [sam3.tracker_rope.apply_rotary_enc(*inside, table, repeat_freqs_k=True)]
    if keys.repeat:  # upstream's real form cannot do without keys
        form = sam3.tracker_rope.apply_rotary_enc_real
        references.append(form(*inside, table.real, table.imag, repeat_freqs_k=True))
    step = torch.finfo(dtype).eps if dtype in HALVES else 0.0
    for reference in references:
        for x, actual, expected in zip(inside, rotated[keys], reference, strict=True):
            assert actual.shape == expected.shape == x.shape
            assert bool(((actual.double() - expected.double()).abs() <= (3 * EPS + step) * lengths(x)).all())


def test_it_is_one_operator_of_torch() -> None:
    """Schema, fake implementation and aliasing are what torch asks of an operator."""
    x, cos, sin = torch.randn(2, 3, 10, 8), torch.randn(5, 4), torch.randn(5, 4)
    torch.library.opcheck(
        torch.ops.sam3_tvm.rotate_pairs, ([x, x[:, :, :5]], cos, sin), test_utils=("test_schema", "test_faketensor")
    )


def test_tables_that_do_not_fit_are_refused() -> None:
    tables = (torch.ones(5, 4), torch.ones(5, 4))
    with pytest.raises(ValueError, match="does not fit 6 tokens"):
        rotate(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 6, 8), tables)


def prepared(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.export.ExportedProgram, tvm.IRModule, list[np.ndarray]]:
    """Exported, imported, and the arguments of `main`."""
    with TENSORIR.apply(module):
        program = export_program(module, inputs)
    imported, parameters = TORCH.import_exported(program, TENSORIR)
    return program, imported, [*(x.numpy() for x in inputs), *parameters.values()]


def run_cpu(imported: tvm.IRModule, arguments: list[np.ndarray]) -> tuple[list[tvm.runtime.Tensor], list[str]]:
    """What the CPU pipeline's code returns, and the names of its kernels."""
    target = TARGETS["llvm"].tvm_target()
    # as inputs, so that weights need no transformation
    imported["main"] = imported["main"].with_attr("num_input", len(arguments))
    lowered = cpu_pipeline(target)(imported)
    machine = tvm.relax.VirtualMachine(tvm.relax.build(lowered, target, relax_pipeline=None), tvm.cpu())
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arguments]
    return list(machine["main"](*tensors)), functions_of(lowered)


def hold(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """Holds the program compiled for the CPU to upstream's complex one; names of its kernels."""
    with torch.no_grad():
        expected = copy.deepcopy(module)(*inputs)  # the tracker keeps its table for another size
    program, imported, arguments = prepared(module, inputs)
    called = [node.target for node in program.graph.nodes if "rotate_pairs" in str(node.target)]
    assert called == [torch.ops.sam3_tvm.rotate_pairs.default]
    results, kernels = run_cpu(imported, arguments)
    for actual, wanted in zip(results, listed(expected), strict=True):
        np.testing.assert_allclose(actual.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-5)
    return kernels


@pytest.mark.parametrize(
    ("width", "height", "heads", "head_size"),
    [pytest.param(5, 3, 2, 64, marks=pytest.mark.smoke), (1, 1, 1, 4), (7, 5, 3, 20)],
)
def test_the_trunks_attention_rotates_while_it_reads(sam3, width: int, height: int, heads: int, head_size: int) -> None:
    torch.manual_seed(0)
    size = heads * head_size
    attention = sam3.trunk.Attention(size, heads, use_rope=True, input_size=(height, width)).eval()
    kernels = hold(attention, (torch.randn(2, height, width, size),))
    assert not [name for name in kernels if "rotate_pairs" in name]
    assert "attention" in kernels


@pytest.mark.parametrize(("side", "frames", "excluded"), [(3, 1, 0), (3, 4, 0), (3, 2, 5), (4, 2, 3)])
def test_the_trackers_attention_rotates_while_it_reads(sam3, side: int, frames: int, excluded: int) -> None:
    """Keys of several frames, object pointers that keep their phase, and tables of another size (of side 3)."""
    torch.manual_seed(0)
    attention = sam3.tracker.RoPEAttention(32, 2, rope_k_repeat=True, feat_sizes=(3, 3)).eval()
    keys = torch.randn(2, frames * side * side + excluded, 32)
    inputs = (torch.randn(2, side * side, 32), keys, torch.randn_like(keys))
    kernels = hold(Excluding(attention, excluded), inputs)
    assert not [name for name in kernels if "rotate_pairs" in name]
    assert "attention" in kernels


def test_keys_beside_some_that_keep_their_phase_are_still_read_in_pairs(sam3) -> None:
    """Nothing in the kernel asks whether a feature is the first or the second of its pair."""
    attention = sam3.tracker.RoPEAttention(32, 2, rope_k_repeat=True, feat_sizes=(3, 3)).eval()
    _, imported, _ = prepared(Excluding(attention, 5), (torch.randn(2, 9, 32), *(torch.randn(2, 23, 32),) * 2))
    kernel = cpu_pipeline(TARGETS["llvm"].tvm_target())(imported)["attention"]
    info = info_of(kernel)
    assert info is not None and "keys" in info.reads
    assert "% 2 == 0" not in kernel.script()


class Excluding(torch.nn.Module):
    """The tracker's attention with a number of keys that are not rotated."""

    def __init__(self, attention: torch.nn.Module, excluded: int) -> None:
        super().__init__()
        self.attention, self.excluded = attention, excluded

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, k, v, num_k_exclude_rope=self.excluded)


class Returning(torch.nn.Module):
    """Rotated queries and keys that are read by attention and returned as well."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k = self.attention._apply_rope(q, k)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v), q, k


def test_what_is_returned_too_is_computed_once(sam3) -> None:
    torch.manual_seed(0)
    attention = sam3.trunk.Attention(24, 2, use_rope=True, input_size=(3, 5)).eval()
    kernels = hold(Returning(attention), tuple(torch.randn(2, 2, 15, 12) for _ in range(3)))
    assert [name for name in kernels if "rotate_pairs" in name] == ["rotate_pairs"]


@pytest.mark.parametrize("name", ["cuda", "metal"])
def test_the_gpus_default_schedules_take_the_kernel(sam3, name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    target = TARGETS[name].tvm_target()
    attention = sam3.trunk.Attention(24, 2, use_rope=True, input_size=(3, 5)).eval()
    inputs = tuple(torch.randn(2, 2, 15, 12) for _ in range(3))
    _, imported, _ = prepared(Returning(attention), inputs)
    with target, caplog.at_level(logging.WARNING):
        lowered = TARGETS[name].pipeline(target)(imported)
    (kernel,) = [f for v, f in lowered.functions_items() if "rotate_pairs" in v.name_hint]
    assert "threadIdx.x" in kernel.script()
    assert not [record for record in caplog.records if "rotate_pairs" in record.getMessage()]
