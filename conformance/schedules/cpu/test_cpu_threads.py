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
import tvm
from torch import nn
from tvm.script.ir_builder import tirx as T

from conformance.support.kernels import Arrays, call_of
from conformance.support.place import build, virtual_machine
from harness.compiler.schedules.common.kernel import Argument, fp32, parallel_with_workspace, prim_func
from harness.compiler.targets import HOST
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.runtime.executable import Executable
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


def linear(*widths: int) -> nn.Module:
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))


def seeded(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


KERNELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "linear": (lambda: linear(512, 500), ((700, 512),)),
    "linear of few rows": (lambda: linear(128, 512), ((20, 128),)),
    "feed-forward": (lambda: linear(64, 2048, 64), ((4100, 64),)),
    "product of activations": (lambda: _Product(), ((3, 70, 48), (3, 48, 130))),
    "attention": (Attention, ((2, 3, 300, 32), (2, 3, 300, 32), (2, 3, 300, 32))),
    "attention with a bias": (Attention, ((1, 2, 201, 32), (1, 2, 500, 32), (1, 2, 500, 32), (1, 2, 201, 500))),
    "attention that streams keys": (Attention, ((1, 1, 700, 64), (1, 1, 1501, 64), (1, 1, 1501, 64))),
    "attention of few queries": (Attention, ((1, 2, 3, 64), (1, 2, 2000, 64), (1, 2, 2000, 64))),
    "convolution": (lambda: nn.Conv2d(24, 40, 3, stride=2), ((1, 24, 61, 61),)),
    "convolution 1×1": (lambda: nn.Conv2d(40, 70, 1), ((2, 40, 33, 31),)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(32, 24, 2, stride=2), ((1, 32, 25, 27),)),
    "minimal filtering": (lambda: nn.Conv2d(48, 64, 3, padding=1), ((2, 48, 37, 41),)),
    "minimal filtering in parts of the filters": (lambda: nn.Conv2d(96, 130, 3, padding=1), ((2, 96, 37, 41),)),
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


def hold_module(
    module: tvm.IRModule, target: tvm.target.Target, folder: Path, inputs: Arrays, weights: Arrays = ()
) -> None:
    """Holds a lowered module, of arrays, in the same way."""
    library = folder / "kernel.so"
    build(module, target).export_library(str(library))
    call = call_of(virtual_machine(tvm.runtime.load_module(str(library)), target), weights)
    hold(library, lambda: [call(*inputs)])


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


def loop(folder: Path, body: Callable[..., None], length: int) -> tuple[Path, Callable[[], np.ndarray]]:
    """A library with a function that gets a tensor [length] of zeros, and what runs it and returns the tensor."""
    function = prim_func("filling", [Argument("result", (length,))], body)
    library = folder / "loop.so"
    module = tvm.IRModule({"filling": function.with_attr("global_symbol", "filling")})
    tvm.compile(module, HOST.tvm_target()).export_library(str(library))
    filling = tvm.runtime.load_module(str(library))["filling"]

    def run() -> np.ndarray:
        result = tvm.runtime.tensor(np.zeros(length, np.float32))
        filling(result)
        return result.numpy()

    return library, run


def test_a_loop_whose_result_depends_on_threads_is_noticed(tmp_path: Path) -> None:
    """Each iteration adds to what the one before it left."""

    def body(result: tvm.tirx.Buffer) -> None:
        with T.parallel(0, 100) as i:
            T.buffer_store(result, result[i] + fp32(1.0), [i + 1])

    library, run = loop(tmp_path, body, 101)
    with launched_by(library, one_by_one(1)):
        assert run()[-1] == 100
    with launched_by(library, one_by_one(100)):
        assert run()[-1] == 1


def test_a_thread_keeps_what_it_made_and_nobody_else_sees_it(tmp_path: Path) -> None:
    """Four things are made of which ten tasks each are: once by each thread that has such a task."""

    def body(made: tvm.tirx.Buffer) -> None:
        with parallel_with_workspace(40, "float32", (3,), (5, 7)) as (task, workspace):
            with workspace.fill_once(task // 10):
                T.buffer_store(made, fp32(1.0), [task])
                T.buffer_store(workspace.buffers[0], tvm.tirx.Cast("float32", task // 10), [2])
                T.buffer_store(workspace.buffers[1], fp32(0.5), [4, 6])
            wrong = (
                workspace.buffers[0][2] - tvm.tirx.Cast("float32", task // 10) + workspace.buffers[1][4, 6] - fp32(0.5)
            )
            T.buffer_store(made, made[task] + wrong, [task])

    library, run = loop(tmp_path, body, 40)
    for threads, firsts in (
        (1, range(0, 40, 10)),
        (2, range(0, 40, 10)),
        (40, range(40)),
        (3, (0, 10, 14, 20, 28, 30)),
    ):
        with launched_by(library, one_by_one(threads)):
            assert list(np.flatnonzero(run())) == list(firsts)
            assert set(run()) <= {0.0, 1.0}
