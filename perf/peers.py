"""The peers, which users would pick instead of ours: TVM alone, OpenVINO, ONNX Runtime, torch.compile, a GPU.

Each peer is set as its users have it or as its own documentation recommends for latency (`Peer.setting`), and a peer
with two such settings is two peers. All have the same weights and inputs as the other sides and as many threads; those
that read a file or compile have the module with rotary position encoding as real arithmetic (strategy `real`). The
export to a file runs in a process of its own (`prepare`), and so does the side that loads and runs the file
(`perf.peer_sides` in a `perf.processes.BenchmarkProcess`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from harness.compiler.lowering.route import Route
from harness.core.processes.call import WorkerEnd, run_isolated
from perf.processes import error_sentence
from perf.sides import MODULE, Request

ROUTE = Route(frontend="torch", strategy="real")
"""How the module is exported for every peer."""
ONNX = "model.onnx"
OPSET = 20
"""Of ONNX: the first with `Gelu`; exported programs are lowered to it, and both runtimes know all of it."""
PREPARE_SECONDS = 1200.0
"""How long making a file may take."""


class PeerError(RuntimeError):
    """Why a peer cannot be measured, in one sentence."""


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        setting: How it is set, in words.
        side: Its context manager for `perf.processes.BenchmarkProcess`.
        packages: What must be installed, by distribution name.
        room: Memory that it may need, in multiples of PyTorch's weights and of PyTorch's memory of a run; measured.
        prepare: The function that turns the module into a file, as `module:name` for
            `harness.core.processes.call.run_isolated`; None if the peer reads no file.
        compiles: Whether it compiles when it is first called, so that its side has the function `COMPILE`.
        chooses: Whether it chooses the type in which it computes, so that its side has the function `PRECISION`.
        precision: The precision of the cases that it is a peer of; empty for a peer of every precision.
        target: The target of the cases that it is a peer of, because it runs on the same device.
    """

    setting: str
    side: str
    packages: tuple[str, ...]
    room: tuple[float, float]
    prepare: str | None = None
    compiles: bool = False
    chooses: bool = False
    precision: str = ""
    target: str = "llvm"


_OPENVINO = ("onnx", "onnxscript", "openvino")
_ONNXRUNTIME = ("onnx", "onnxscript", "onnxruntime")
# OpenVINO's own conversion of exported programs gives wrong results for the geometry encoder (2026.4), and none faster.
EXPORT = "perf.peers:export_onnx"

PEERS = {
    "openvino": Peer(
        "no hints: least latency, in the type that it chooses",
        "perf.peer_sides:openvino_side",
        _OPENVINO,
        (3, 2),
        prepare=EXPORT,
        chooses=True,
    ),
    "openvino f32": Peer(
        "INFERENCE_PRECISION_HINT f32", "perf.peer_sides:openvino_f32_side", _OPENVINO, (3, 2), prepare=EXPORT
    ),
    "onnxruntime": Peer(
        "sequential, all graph optimizations, threads that spin within a run",
        "perf.peer_sides:onnx_side",
        _ONNXRUNTIME,
        (2, 12),
        prepare=EXPORT,
    ),
    "tvm default": Peer(
        "relax.get_default_pipeline: TVM's own legalization and fusion, loops as they come",
        "perf.peer_sides:default_side",
        ("apache-tvm",),
        (2, 2),
        prepare="perf.tvm_peers:compile_default",
        precision="fp32",
    ),
    "torch.compile": Peer("default mode", "perf.peer_sides:compiled_side", ("torch",), (2, 2), compiles=True),
    "torch.compile max-autotune": Peer(
        "frozen weights, mode max-autotune", "perf.peer_sides:autotuned_side", ("torch",), (3, 2), compiles=True
    ),
    "torch bf16": Peer(
        'eager under torch.autocast("cpu", bfloat16)', "perf.peer_sides:bf16_side", ("torch",), (2, 2), precision="bf16"
    ),
    "torch.compile bf16": Peer(
        'frozen weights, mode max-autotune, under torch.autocast("cpu", bfloat16)',
        "perf.peer_sides:autotuned_bf16_side",
        ("torch",),
        (3, 2),
        compiles=True,
        precision="bf16",
    ),
    "torch cuda": Peer(
        "eager on the GPU, products in float32 and convolutions in TF32, as PyTorch sets them",
        "perf.peer_sides:cuda_side",
        ("torch",),
        (1, 1),
        target="cuda",
    ),
    "torch.compile cuda": Peer(
        "default mode, otherwise as torch cuda",
        "perf.peer_sides:compiled_cuda_side",
        ("torch",),
        (1, 1),
        compiles=True,
        target="cuda",
    ),
    "torch cuda fp16": Peer(
        'eager on the GPU under torch.autocast("cuda", float16)',
        "perf.peer_sides:cuda_fp16_side",
        ("torch",),
        (1, 1),
        precision="fp16",
        target="cuda",
    ),
    "torch cuda bf16": Peer(
        'eager on the GPU under torch.autocast("cuda", bfloat16)',
        "perf.peer_sides:cuda_bf16_side",
        ("torch",),
        (1, 1),
        precision="bf16",
        target="cuda",
    ),
}


def peers_of(precision: str, target: str, names: Iterable[str]) -> list[str]:
    """Returns the peers among `names` that are measured beside cases of a precision and a target."""
    return [name for name in names if PEERS[name].precision in ("", precision) and PEERS[name].target == target]


def versions() -> dict[str, str | None]:
    """Version of every package of a peer; None where it is not installed."""
    packages = dict.fromkeys(package for peer in PEERS.values() for package in peer.packages)
    return {package: _version(package) for package in packages}


def prepare(peer: Peer, request: Request, run_bytes: int, done: dict[str, float]) -> float:
    """Makes the file that a peer loads, if it loads one, and returns the seconds that this takes.

    Args:
        peer: The peer that loads the file.
        request: Says where the module is; the file is written to the same folder.
        run_bytes: Memory that PyTorch needs for a run, beside the weights.
        done: Seconds of the files that exist, by function; a file that is made is added.

    Raises:
        PeerError: A package is not installed, there is not enough memory, or the module does not get through.
    """
    check_room(peer, (request.folder / MODULE).stat().st_size, run_bytes)
    if peer.prepare is None:
        return 0.0
    if peer.prepare not in done:
        done[peer.prepare] = float(run_step(peer.prepare, request))
    return done[peer.prepare]


def check_room(peer: Peer, weights: int, run_bytes: int) -> None:
    """Checks that a peer's packages are installed, and that there is memory for it.

    Args:
        peer: The peer.
        weights: Bytes of PyTorch's weights.
        run_bytes: Memory that PyTorch needs for a run, beside the weights.

    Raises:
        PeerError: A package is not installed, or there is not enough memory.
    """
    missing = [package for package in peer.packages if _version(package) is None]
    if missing:
        raise PeerError(f"{missing[0]} is not installed: pip install 'sam3-tvm[peers]'")
    room, free = peer.room[0] * weights + peer.room[1] * run_bytes, psutil.virtual_memory().available
    if free < room:
        raise PeerError(
            f"left out: beside the other sides it may need {room / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are "
            "free; name it alone with --peer"
        )


def run_step(function: str, request: Any) -> Any:
    """Returns the result of a function `module:name` that makes files for a peer, in a process of its own.

    Raises:
        PeerError: It fails.
    """
    ended = run_isolated(function, request, timeout=PREPARE_SECONDS)
    if ended.kind is not WorkerEnd.OK:
        error = ended.error
        reason = error_sentence(error.type, error.message) if error else ended.kind.value
        raise PeerError(f"the module cannot be converted: {reason}")
    return ended.value


def export_onnx(request: Request, on_stage: Callable[[str], None]) -> float:
    """Writes an ONNX file with its weights beside it, and returns the seconds; in a process of its own."""
    import torch

    with request.context():
        on_stage("load")
        module, inputs = request.module(), tuple(map(torch.from_numpy, request.inputs()))
        start = time.perf_counter()
        on_stage("export")
        program = ROUTE.export(module, inputs)
        on_stage("convert")
        converted = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
        assert converted is not None
        converted.save(request.folder / ONNX, external_data=True)
    return time.perf_counter() - start


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
