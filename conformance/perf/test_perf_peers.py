"""Peers are set as they say, and are measured beside the cases that they are peers of."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch
import tvm
from torch._inductor import config

from harness.compiler.targets import TARGETS
from harness.core.case import DEFAULT_STRATEGY, TINY, Case
from harness.core.precision import PRECISIONS
from harness.models.registry import models
from harness.models.sam3.deployed.options import Sam3Options
from harness.models.sam3.subjects import END_TO_END
from harness.models.sam3.upstream import upstream
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact
from perf import peer_sides
from perf.model_peers import FolderRequest, ModelPeer, PeerModel, prepare
from perf.peer_sides import COMPILE, PRECISION
from perf.peers import PEERS, ROUTE, export_onnx, peers_of
from perf.processes import BenchmarkProcess, Load
from perf.sides import IMPORTED, RUN, Request, runner, save
from perf.tvm_peers import compile_default
from perf.whole_model import PHOTO_AND_TEXT, check, folder_calls


@pytest.fixture
def request_of_linear(tmp_path: Path) -> Request:
    """A linear layer on a few rows, as the sides read it."""
    torch.manual_seed(0)
    save(torch.nn.Linear(64, 48), [torch.randn(8, 64)], [], tmp_path)
    return Request(tmp_path, next(iter(models())))


@pytest.fixture
def request_of_imported(tmp_path: Path) -> Request:
    """A linear layer with its activation, as TVM alone compiles it, too."""
    torch.manual_seed(0)
    module, inputs = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU()), torch.randn(8, 64)
    imported = ROUTE.lower(ROUTE.export(module, (inputs,)), module)
    save(module, [inputs], list(imported.parameters().values()), tmp_path)
    (tmp_path / IMPORTED).write_text(tvm.ir.save_json(imported.module), encoding="utf-8")
    return Request(tmp_path, next(iter(models())))


def outputs_of(side: AbstractContextManager[Load], function: str = RUN) -> np.ndarray:
    with side as load:
        (output,) = load()[function]()
    return np.array(output)


def expected(request: Request, autocast: torch.dtype | None = None) -> np.ndarray:
    module = torch.load(request.folder / "module.pt", weights_only=False)
    inputs = torch.from_numpy(np.load(next(request.folder.glob("input0*.npy"))))
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        return np.array(module(inputs).float())


def test_every_peer_is_of_some_case() -> None:
    cases = [(precision, target) for target in TARGETS for precision in PRECISIONS]
    assert {name for case in cases for name in peers_of(*case, PEERS)} == set(PEERS)
    on_cpu, on_gpu = (set(peers_of("bf16", target, PEERS)) for target in ("llvm", "cuda"))
    assert on_cpu - set(peers_of("fp32", "llvm", PEERS)) == {"torch bf16", "torch.compile bf16"}
    assert on_gpu == {"torch cuda", "torch.compile cuda", "torch cuda bf16"} and not on_cpu & on_gpu
    assert all(hasattr(peer_sides, peer.side.partition(":")[2]) for peer in PEERS.values())


def test_pytorch_in_bf16_runs_under_autocast_and_gives_float32(request_of_linear: Request) -> None:
    found = outputs_of(peer_sides.bf16_side(request_of_linear))
    assert found.dtype == np.float32
    assert np.array_equal(found, expected(request_of_linear, torch.bfloat16))
    assert not np.allclose(found, expected(request_of_linear), rtol=1e-5, atol=1e-5)


def test_tvm_alone_computes_the_same(request_of_imported: Request) -> None:
    assert compile_default(request_of_imported, lambda _: None) > 0
    found = outputs_of(peer_sides.default_side(request_of_imported))
    np.testing.assert_allclose(found, expected(request_of_imported), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("package", ["openvino", "onnxruntime"])
def test_runtimes_of_files_compute_in_the_type_that_they_are_set_to(package: str, request_of_linear: Request) -> None:
    pytest.importorskip(package)
    export_onnx(request_of_linear, lambda _: None)
    side = peer_sides.openvino_f32_side if package == "openvino" else peer_sides.onnx_side
    np.testing.assert_allclose(outputs_of(side(request_of_linear)), expected(request_of_linear), rtol=1e-5, atol=1e-5)
    if package == "openvino":
        told = {}
        for side in (peer_sides.openvino_f32_side, peer_sides.openvino_side):
            with side(request_of_linear) as load:
                told[side] = load()[PRECISION]()
        assert told[peer_sides.openvino_f32_side] == "f32" and told[peer_sides.openvino_side] in ("f32", "bf16", "f16")


@pytest.mark.wide
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="torch.compile needs a C++ compiler")
def test_torch_compile_in_bf16_runs_under_autocast(request_of_linear: Request) -> None:
    found = outputs_of(peer_sides.autotuned_bf16_side(request_of_linear), COMPILE)
    assert found.dtype == np.float32 and not config.freezing
    # The product is rounded once to bfloat16, which has 8 bits, wherever the sums are rounded.
    assert np.allclose(found, expected(request_of_linear, torch.bfloat16), rtol=2**-7, atol=2**-7)
    assert not np.allclose(found, expected(request_of_linear), rtol=1e-5, atol=1e-5)


@pytest.mark.wide
def test_a_peer_answers_through_the_entry_points_of_a_folder(tiny_artifact: Path, tmp_path: Path) -> None:
    case = Case(END_TO_END.name, DEFAULT_STRATEGY, "llvm", TINY)
    peer = ModelPeer("torch bf16", case, Sam3Options(), tmp_path)
    assert prepare(peer, tiny_artifact, run_bytes=0, done={}) == 0
    artifact = Artifact.load(tiny_artifact)
    ours = folder_calls()(Sam3(artifact))[PHOTO_AND_TEXT]()
    with upstream():
        runs = {
            name: runner(entry.module(), list(map(torch.from_numpy, entry.inputs())))
            for name, entry in peer.requests().items()
        }
        check(folder_calls()(Sam3(PeerModel(artifact, runs)))[PHOTO_AND_TEXT](), ours)

    request = FolderRequest("perf.whole_model:folder_calls", tiny_artifact, peer)
    with BenchmarkProcess("perf.model_peers:folder_side", request) as process:
        _, rounded = process.first(PHOTO_AND_TEXT)
    with pytest.raises(AssertionError):
        check(rounded, ours)
