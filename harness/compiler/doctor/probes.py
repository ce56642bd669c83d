"""Probes TVM, PyTorch and threads in worker processes, so that a crash in native code is a finding."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from harness.core.processors import Processors
from harness.runtime.threads import VARIABLE


def probe_tvm(processors: Processors, on_stage: Callable[[str], None]) -> dict[str, Any]:
    """Examines in a worker which targets TVM can compile for and run here.

    The stage tells where a crash happened.
    """
    on_stage("import tvm")
    import tvm
    from tvm.target import codegen

    from harness.compiler.targets import TARGETS
    from harness.compiler.targets.llvm import cpu_name
    from harness.runtime.cpu import VECTOR_FEATURES

    on_stage("targets")
    cpu = cpu_name(processors)
    features = codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": cpu}))
    return {
        "llvm": codegen.llvm_version_major(allow_none=True),
        "host_cpu": codegen.llvm_get_system_cpu(),
        "cpu": cpu,
        "features": [feature for feature in VECTOR_FEATURES if feature in features],
        "targets": {
            name: (target.compile_problem(), target.run_problem(processors)) for name, target in TARGETS.items()
        },
    }


def probe_threads(count: int | None, on_stage: Callable[[str], None]) -> int:
    """Counts in a worker the threads of a parallel loop of TVM, by default or after setting `count` threads."""
    from harness.core.processes.threads import OPENMP_VARIABLE, configure_threads, tvm_threads

    if count is None:
        for name in (VARIABLE, OPENMP_VARIABLE):
            os.environ.pop(name, None)
    else:
        configure_threads(count)
    return tvm_threads()


def probe_torch(on_stage: Callable[[str], None]) -> dict[str, Any]:
    """Checks in a worker that torch and torchvision load together and run an operator of torchvision."""
    on_stage("import torch")
    import torch

    on_stage("import torchvision")
    import torchvision

    on_stage("torchvision.ops.nms")
    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return {"cuda": torch.cuda.is_available(), "threads": torch.get_num_threads()}
