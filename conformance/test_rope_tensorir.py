"""Strategy `tensorir`: its kernel is upstream's rotation, one operator in the graph, and no pass before attention."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tvm

from conformance.kernels import functions_of
from harness.frontend import export_program
from harness.model.upstream import upstream
from harness.rope import STRATEGIES
from harness.rope.rotate_pairs import rotate
from harness.schedules.cpu import cpu_pipeline
from harness.targets import TARGETS

TENSORIR = STRATEGIES["tensorir"]


@pytest.fixture(scope="module")
def sam3():
    """The upstream modules with RoPE inside."""
    with upstream():
        import sam3.model.vitdet as trunk
        import sam3.sam.rope as tracker_rope
        import sam3.sam.transformer as tracker

        yield SimpleNamespace(trunk=trunk, tracker=tracker, tracker_rope=tracker_rope)


def test_it_is_one_operator_of_torch() -> None:
    """Schema, fake implementation and aliasing are what torch asks of an operator."""
    x, cos, sin = torch.randn(2, 3, 10, 8), torch.randn(5, 4), torch.randn(5, 4)
    torch.library.opcheck(
        torch.ops.sam3_tvm.rotate_pairs, ([x, x[:, :, :5]], cos, sin), test_utils=("test_schema", "test_faketensor")
    )


def test_tables_that_do_not_fit_are_refused() -> None:
    tables = {"rope_cos": torch.ones(5, 4), "rope_sin": torch.ones(5, 4)}
    with pytest.raises(ValueError, match="does not fit 6 tokens"):
        rotate(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 6, 8), tables)


def prepared(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.export.ExportedProgram, tvm.IRModule, list[np.ndarray]]:
    """Exported, imported, and the arguments of `main`."""
    with TENSORIR.apply(module):
        program = export_program(module, inputs)
    imported, parameters = TENSORIR.import_program(program)
    return program, imported, [*(x.numpy() for x in inputs), *parameters.values()]


def hold(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """Holds the program compiled for the CPU to upstream's complex one; names of its kernels."""
    with torch.no_grad():
        expected = copy.deepcopy(module)(*inputs)  # the tracker keeps its table for another size
    program, imported, arguments = prepared(module, inputs)
    called = [node.target for node in program.graph.nodes if "rotate_pairs" in str(node.target)]
    assert called == [torch.ops.sam3_tvm.rotate_pairs.default]
    target = TARGETS["llvm"].tvm_target()
    # as inputs, so that weights need no transformation
    imported["main"] = imported["main"].with_attr("num_input", len(arguments))
    lowered = cpu_pipeline(target)(imported)
    machine = tvm.relax.VirtualMachine(tvm.relax.build(lowered, target, relax_pipeline=None), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arguments))
    for actual, wanted in zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True):
        np.testing.assert_allclose(actual.numpy(), wanted.numpy(), rtol=1e-5, atol=1e-5)
    return functions_of(lowered)


@pytest.mark.parametrize(("width", "height", "heads", "head_size"), [(5, 3, 2, 64), (1, 1, 1, 4), (7, 5, 3, 20)])
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
