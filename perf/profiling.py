"""Where the time of one run goes, kernel by kernel, through the instrument of TVM's virtual machine."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tvm

    from harness.runtime.executable import Executable

RUNS_SECONDS, MOST_RUNS = 0.5, 25
"""How long runs are repeated, and how often at most."""

BUILTIN = "vm.builtin."
"""What the virtual machine does itself: memory, shapes, views."""


def kernel_times(executable: Executable, inputs: Sequence[np.ndarray | tvm.runtime.Tensor]) -> list[dict[str, Any]]:
    """Every compiled function that one run calls, the longest first; of several short runs, the one in the middle.

    A GPU is waited for before and after each of them, so that starting it is part of its time.

    Returns:
        `name`, number of `calls`, their `seconds` together, and the `bytes` of all their tensor arguments together,
        each argument counted once per call.
    """
    runs: list[dict[str, dict[str, Any]]] = []
    start = 0.0

    def note(_function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> None:
        nonlocal start
        if name.startswith(BUILTIN):
            return
        executable.device.sync()
        if before:
            start = time.perf_counter()
            return
        seconds = time.perf_counter() - start
        kernel = runs[-1].setdefault(name, {"name": name, "calls": 0, "seconds": 0.0, "bytes": 0})
        kernel["calls"] += 1
        kernel["seconds"] += seconds
        kernel["bytes"] += sum(map(argument_bytes, arguments))

    machine = executable._vm  # nothing else needs it
    machine["set_instrument"](note)
    until = time.perf_counter() + RUNS_SECONDS
    while not runs or (len(runs) < MOST_RUNS and time.perf_counter() < until):
        runs.append({})
        executable.run(inputs)
    machine["set_instrument"](lambda *_: None)
    runs.sort(key=lambda run: sum(kernel["seconds"] for kernel in run.values()))
    return sorted(runs[len(runs) // 2].values(), key=lambda kernel: -kernel["seconds"])


@dataclass(frozen=True)
class Work:
    """What one call of a compiled function does.

    Attributes:
        size: Its extents in words, empty where it does not tell them.
        flop: Its operations if it is a product, a convolution or attention, counted as `torch.utils.flop_counter` does:
            a 3×3 convolution as a direct one, attention as its two products.
    """

    size: str = ""
    flop: int | None = None


def with_work(times: Sequence[Mapping[str, Any]], work: Mapping[str, Work]) -> list[dict[str, Any]]:
    """The times of those functions that are compiled, with their size and the operations of all their calls together.

    Args:
        times: From `kernel_times`.
        work: From `work_of_functions`.
    """
    return [
        {**kernel, "size": one.size, "flop": None if one.flop is None else one.flop * kernel["calls"]}
        for kernel in times
        if (one := work.get(kernel["name"])) is not None
    ]


def work_of_functions(lowered: tvm.IRModule) -> dict[str, Work]:
    """The work of each compiled function, by name."""
    from tvm import tirx

    from harness.compiler.schedules.common.kernel_info import infos_of, size_of

    functions = (v.name_hint for v, function in lowered.functions_items() if isinstance(function, tirx.PrimFunc))
    known = {name: Work(size_of(info), info.flop) for name, info in infos_of(lowered).items() if info.flop is not None}
    return {name: known.get(name, Work()) for name in functions}


def flop_of_program(program: Any) -> int:
    """Floating-point operations of an exported program's products, convolutions and attention, without running them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    graph = program.graph_module
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torch.fx.Interpreter(graph).run(*inputs)
    return int(counter.get_total_flops())


def argument_bytes(argument: Any) -> int:
    """Returns the bytes of an argument of a compiled function; none if it is no tensor."""
    shape = getattr(argument, "shape", None)
    return math.prod(shape) * np.dtype(str(argument.dtype)).itemsize if shape is not None else 0
