"""Results do not depend on the number of threads: bit for bit the same on 1 to 64, many more than there are CPUs.

Each kernel is compiled once, as a folder is, and its parallel loops are cut as TVM's pool cuts them on so many threads
(`perf/launching.py`): whoever computes a task, and whatever was computed before, it gives the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harness.core.case import DEFAULT_STRATEGY, Case
from harness.runtime.executable import Executable
from harness.targets import HOST
from perf.compiling import compiled
from perf.components import prepare
from perf.launching import launched_by, on_threads, one_by_one
from perf.results import UNTUNED
from perf.sides import read

THREADS = (1, 2, 3, 7, 16, 64)
APART = 1000
"""Parts that have an iteration each, in loops of so many iterations at most."""


class Attention(nn.Module):
    """Attention of queries to themselves or to given keys and values, with a bias if there is one."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, bias)


def linear(rows: int, *widths: int) -> nn.Module:
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))


def seeded(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


KERNELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda: linear(1000, 96, 200), ((1000, 96),)),
    "linear of few rows": (lambda: linear(20, 128, 512), ((20, 128),)),
    "feed-forward": (lambda: linear(4100, 64, 2048, 64), ((4100, 64),)),
    "product of activations": (lambda: _Product(), ((3, 70, 48), (3, 48, 130))),
    "attention": (Attention, ((2, 3, 300, 32), (2, 3, 300, 32), (2, 3, 300, 32))),
    "attention with a bias": (Attention, ((1, 2, 201, 32), (1, 2, 500, 32), (1, 2, 500, 32), (1, 2, 201, 500))),
    "attention that streams keys": (Attention, ((1, 1, 700, 64), (1, 1, 1501, 64), (1, 1, 1501, 64))),
    "attention of few queries": (Attention, ((1, 2, 3, 64), (1, 2, 2000, 64), (1, 2, 2000, 64))),
    "convolution": (lambda: nn.Conv2d(24, 40, 3, stride=2), ((1, 24, 61, 61),)),
    "convolution 1×1": (lambda: nn.Conv2d(40, 70, 1), ((2, 40, 33, 31),)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(32, 24, 2, stride=2), ((1, 32, 25, 27),)),
    "minimal filtering": (lambda: nn.Conv2d(48, 64, 3, padding=1), ((2, 48, 37, 41),)),
    "depthwise": (lambda: nn.Conv2d(40, 40, 7, padding=3, groups=40), ((1, 40, 30, 30),)),
    "layer norm": (lambda: nn.LayerNorm(256), ((999, 256),)),
    "group norm": (lambda: nn.GroupNorm(8, 64), ((1, 64, 90, 91),)),
    "elementwise": (nn.GELU, ((77, 3001),)),
    "softmax": (lambda: nn.Softmax(-1), ((333, 401),)),
}


class _Product(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.bmm(left, right)


def hold(library: Path, run: Callable[[], list[np.ndarray]]) -> None:
    """Holds a library's results on any number of threads to those on TVM's own pool, bit for bit."""
    expected = run()

    def check(how: str) -> None:
        for found, wanted in zip(run(), expected, strict=True):
            assert found.tobytes() == wanted.tobytes(), f"other bits {how}"

    for count in THREADS:
        with on_threads(count) as launch, launched_by(library, launch):
            check(f"on {count} threads")
    with launched_by(library, one_by_one(APART)):
        check("one task after the other, the last one first")


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_not_depend_on_threads(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shapes = KERNELS[name]
    library = tmp_path / "kernel.so"
    run = compiled(make().eval(), seeded(*shapes), library)
    hold(library, lambda: [result.numpy() for result in run()])


@pytest.mark.parametrize("component", ["box_head"])
def test_components_do_not_depend_on_threads(component: str, tmp_path: Path) -> None:
    prepared = prepare(Case(component, DEFAULT_STRATEGY, "llvm"), tmp_path, None)
    library = prepared.libraries[UNTUNED]
    executable = Executable(library, HOST.device(), read(tmp_path, "weight"))
    inputs = read(tmp_path, "input")
    hold(library, lambda: executable.run(inputs))


def test_a_loop_whose_result_depends_on_threads_is_noticed(tmp_path: Path) -> None:
    """Each iteration adds to what the one before it left."""
    import tvm
    from tvm.script.ir_builder import tirx as T

    from harness.schedules.common.kernel import Argument, fp32, prim_func

    def body(start: tvm.tirx.Buffer, result: tvm.tirx.Buffer) -> None:
        T.buffer_store(result, start[0], [0])
        with T.parallel(0, 100) as i:
            T.buffer_store(result, result[i] + fp32(1.0), [i + 1])

    function = prim_func("running", [Argument("start", (1,)), Argument("result", (101,))], body)
    library = tmp_path / "loop.so"
    module = tvm.IRModule({"running": function.with_attr("global_symbol", "running")})
    tvm.compile(module, HOST.tvm_target()).export_library(str(library))
    running = tvm.runtime.load_module(str(library))["running"]

    def run() -> list[np.ndarray]:
        result = tvm.runtime.tensor(np.zeros(101, np.float32))
        running(tvm.runtime.tensor(np.zeros(1, np.float32)), result)
        return [result.numpy()]

    with launched_by(library, one_by_one(1)):
        assert run()[0][-1] == 100
    with launched_by(library, one_by_one(100)):
        assert run()[0][-1] == 1
