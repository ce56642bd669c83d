"""The sides of the peers; each runs in a `perf.processes.BenchmarkProcess`. `perf.peers` says how each is set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from harness.core.processes.threads import thread_count
from perf.peers import ONNX, ROUTE
from perf.processes import Calls, Load
from perf.sides import RUN, Request, runner, tvm_side
from perf.tvm_peers import DEFAULT

if TYPE_CHECKING:
    import torch

COMPILE = "compile"
"""The function of a side that compiles when it is first called."""
PRECISION = "precision"
"""The function of a side that tells in which type it computes, by the name that the peer gives it."""


def default_side(request: Request) -> AbstractContextManager[Load]:
    """TVM's own pipeline."""
    return tvm_side(request.with_library(request.folder / DEFAULT))


def openvino_side(request: Request) -> AbstractContextManager[Load]:
    """OpenVINO as `compile_model` sets it: for the least latency, in bfloat16 where the CPU has instructions for it."""
    return _openvino_side(request, {})


def openvino_f32_side(request: Request) -> AbstractContextManager[Load]:
    """OpenVINO that computes in float32."""
    return _openvino_side(request, {"INFERENCE_PRECISION_HINT": "f32"})


@contextmanager
def _openvino_side(request: Request, hints: dict[str, Any]) -> Iterator[Load]:
    import openvino

    inputs = request.inputs()
    properties = {"INFERENCE_NUM_THREADS": thread_count(), **hints}

    def load() -> Calls:
        model = openvino.compile_model(request.folder / ONNX, "CPU", properties)

        def run(arrays: list[Any] = inputs) -> list[Any]:
            results = model(arrays, share_inputs=True)
            return [results[number] for number in range(len(model.outputs))]

        return {RUN: run, PRECISION: lambda: model.get_property("INFERENCE_PRECISION_HINT").to_string()}

    yield load


@contextmanager
def onnx_side(request: Request) -> Iterator[Load]:
    """ONNX Runtime, as its page on thread management sets the CPU for the least latency."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = thread_count()
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    # Its threads spin within a run, as those of the other sides, but must not take a CPU from the next side.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    inputs = request.inputs()

    def load() -> Calls:
        session = onnxruntime.InferenceSession(request.folder / ONNX, options, providers=["CPUExecutionProvider"])
        names = [node.name for node in session.get_inputs()]

        def run(arrays: list[Any] = inputs) -> list[Any]:
            results: list[Any] = session.run(None, dict(zip(names, arrays, strict=True)))
            return results

        return {RUN: run}

    yield load


def compiled_side(request: Request) -> AbstractContextManager[Load]:
    """torch.compile with its default mode and backend, which generates C++."""
    return _compiled_side(request, None)


def autotuned_side(request: Request) -> AbstractContextManager[Load]:
    """torch.compile as PyTorch's tutorial of max-autotune recommends for inference on CPUs, with frozen weights."""
    return _compiled_side(request, "max-autotune")


def autotuned_bf16_side(request: Request) -> AbstractContextManager[Load]:
    """The same under autocast, as that tutorial has it."""
    import torch

    return _compiled_side(request, "max-autotune", torch.bfloat16)


@contextmanager
def _compiled_side(
    request: Request, mode: str | None, autocast: torch.dtype | None = None, device: str = "cpu"
) -> Iterator[Load]:
    import torch
    import torch._dynamo
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    inputs = [torch.from_numpy(array).to(device) for array in request.inputs()]
    # What an earlier run compiled or tuned would make this one look fast.
    with fresh_cache(dir=str(request.folder)), config.patch(freezing=mode is not None), request.context():
        module = request.module()
        with ROUTE.apply_strategy(module):

            def load() -> Calls:
                run = runner(torch.compile(module.to(device), mode=mode), inputs, autocast)
                return {RUN: run, COMPILE: run}

            yield load


def cuda_side(request: Request) -> AbstractContextManager[Load]:
    """PyTorch eager on the GPU."""
    return _eager_side(request, "cuda")


def compiled_cuda_side(request: Request) -> AbstractContextManager[Load]:
    """torch.compile on the GPU with its default mode and backend, which generates Triton."""
    return _compiled_side(request, None, device="cuda")


def cuda_fp16_side(request: Request) -> AbstractContextManager[Load]:
    """PyTorch eager on the GPU under autocast to float16."""
    import torch

    return _eager_side(request, "cuda", torch.float16)


def cuda_bf16_side(request: Request) -> AbstractContextManager[Load]:
    """PyTorch eager on the GPU under autocast to bfloat16."""
    import torch

    return _eager_side(request, "cuda", torch.bfloat16)


def bf16_side(request: Request) -> AbstractContextManager[Load]:
    """PyTorch eager under autocast on the CPU."""
    import torch

    return _eager_side(request, "cpu", torch.bfloat16)


@contextmanager
def _eager_side(request: Request, device: str, autocast: torch.dtype | None = None) -> Iterator[Load]:
    import torch

    inputs = [torch.from_numpy(array).to(device) for array in request.inputs()]
    with request.context():
        request.module()  # imports what it is made of
        # Not `cuda()`, which the context takes from tensors.
        yield lambda: {RUN: runner(request.module().to(device), inputs, autocast)}
