"""What users would pick instead of TVM: torch.compile, ONNX Runtime and OpenVINO, on the same weights and inputs.

Each gets the module with rotary position encoding as real arithmetic (strategy `real`), as TVM does, in fp32, as many
threads as everybody, and all optimizations that do not change the precision. What turns the module into a file runs in
a process of its own (`prepare`), and so does what loads and runs it (`perf.seats.Seat`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from harness.processes import WorkerEnd, run_isolated
from harness.processes.threads import thread_count
from perf.seats import Calls, Load, sentence
from perf.sides import MODULE, RUN, Request, read, read_module, runner, torch_inputs

COMPILE = "compile"
"""What a side can do that compiles when it is first called."""
ONNX = "model.onnx"
OPSET = 20
"""Of ONNX: the first with `Gelu`; exported programs are lowered to it, and both runtimes know all of it."""
PREPARE_SECONDS = 1200.0
"""How long making a file may take."""


class PeerError(RuntimeError):
    """Why a peer cannot take part, in one sentence."""


@dataclass(frozen=True)
class Peer:
    """One of them.

    Attributes:
        side: Its context manager for `perf.seats.Seat`.
        packages: What must be installed, by distribution name.
        room: Memory that it may need, in PyTorch's weights and in what PyTorch needs for a run; measured.
        prepare: What turns the module into a file, as `module:name` for `harness.processes.run_isolated`; none if
            nothing has to.
        compiles: Whether it compiles when it is loaded, and can `COMPILE`.
    """

    side: str
    packages: tuple[str, ...]
    room: tuple[float, float]
    prepare: str | None = None
    compiles: bool = False


PEERS = {
    # Its own conversion of exported programs gives wrong results for the geometry encoder (2026.4), and none faster.
    "openvino": Peer("perf.peers:openvino_side", ("onnx", "onnxscript", "openvino"), (3, 2), "perf.peers:export_onnx"),
    "onnxruntime": Peer(
        "perf.peers:onnx_side", ("onnx", "onnxscript", "onnxruntime"), (2, 12), "perf.peers:export_onnx"
    ),
    "torch.compile": Peer("perf.peers:compiled_side", ("torch",), (2, 2), compiles=True),
}


def versions() -> dict[str, str | None]:
    """Version of every package of a peer; None where it is not installed."""
    packages = dict.fromkeys(package for peer in PEERS.values() for package in peer.packages)
    return {package: _version(package) for package in packages}


def prepare(peer: Peer, folder: Path, run_bytes: int, done: dict[str, float]) -> float:
    """Makes the file that a peer loads, if it loads one; returns the seconds that this takes.

    Args:
        peer: Who wants it.
        folder: Where the module is, and the file will be.
        run_bytes: Memory that PyTorch needs for a run, beside the weights.
        done: Seconds of what is there already, by function; what is made is added.

    Raises:
        PeerError: A package is not installed, there is not enough memory, or the module does not get through.
    """
    missing = [package for package in peer.packages if _version(package) is None]
    if missing:
        raise PeerError(f"{missing[0]} is not installed: pip install 'sam3-tvm[peers]'")
    weights = (folder / MODULE).stat().st_size
    room, free = peer.room[0] * weights + peer.room[1] * run_bytes, psutil.virtual_memory().available
    if free < room:
        raise PeerError(
            f"left out: beside the other sides it may need {room / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are "
            "free; name it alone with --peer"
        )
    if peer.prepare is None:
        return 0.0
    if peer.prepare not in done:
        ended = run_isolated(peer.prepare, Request(folder), timeout=PREPARE_SECONDS)
        if ended.kind is not WorkerEnd.OK:
            error = ended.error
            reason = sentence(error.type, error.message) if error else ended.kind.value
            raise PeerError(f"the module does not become ONNX: {reason}")
        done[peer.prepare] = float(ended.value)
    return done[peer.prepare]


def export_onnx(request: Request, enter: Callable[[str], None]) -> float:
    """An ONNX file, its weights beside it; to be called by `harness.processes.run_isolated`."""
    import torch

    from harness.lowering.frontends.torch_export import export_program
    from harness.lowering.rope import STRATEGIES
    from harness.models.sam3.upstream import upstream

    with upstream():
        enter("load")
        module, inputs = read_module(request.folder), tuple(torch_inputs(request.folder))
        start = time.perf_counter()
        with STRATEGIES["real"].apply(module):
            enter("export")
            program = export_program(module, inputs)
        enter("convert")
        converted = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
        assert converted is not None
        converted.save(request.folder / ONNX, external_data=True)
    return time.perf_counter() - start


@contextmanager
def compiled_side(request: Request) -> Iterator[Load]:
    """torch.compile with its default backend, which generates C++."""
    import torch
    import torch._dynamo
    from torch._inductor import config

    from harness.lowering.rope import STRATEGIES
    from harness.models.sam3.upstream import upstream

    config.force_disable_caches = True  # what an earlier run compiled would make this one look fast
    inputs = torch_inputs(request.folder)
    with upstream():
        module = read_module(request.folder)
        with STRATEGIES["real"].apply(module):

            def load() -> Calls:
                run = runner(torch.compile(module), inputs)
                return {RUN: run, COMPILE: run}

            yield load


@contextmanager
def onnx_side(request: Request) -> Iterator[Load]:
    """ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = thread_count()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    # Its threads spin within a run, as everybody's, but must not take a CPU from the side whose turn is next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    arrays = read(request.folder, "input")

    def load() -> Calls:
        session = onnxruntime.InferenceSession(request.folder / ONNX, options, providers=["CPUExecutionProvider"])
        inputs = dict(zip((node.name for node in session.get_inputs()), arrays, strict=True))
        return {RUN: lambda: session.run(None, inputs)}

    yield load


@contextmanager
def openvino_side(request: Request) -> Iterator[Load]:
    """OpenVINO on the CPU, in fp32 and for the least latency."""
    import openvino

    inputs = read(request.folder, "input")
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": thread_count(),
        "PERFORMANCE_HINT": "LATENCY",
    }

    def load() -> Calls:
        model = openvino.compile_model(request.folder / ONNX, "CPU", properties)

        def run() -> list[Any]:
            results = model(inputs, share_inputs=True)
            return [results[number] for number in range(len(model.outputs))]

        return {RUN: run}

    yield load


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
