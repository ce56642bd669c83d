"""Builds a folder that shows the fault of one kernel with TVM alone: module, tensors, script and description."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from safetensors.numpy import save
from tvm import ir, relax

from harness.compiler.schedules.common.origins import LOAD, bindings_of, callee
from harness.compiler.schedules.cpu.pipeline import to_loops
from harness.compiler.targets.compiling import lower_module
from harness.core.files import temporary_folder, write_files
from harness.core.program import Array
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS
from harness.verify.diagnose.ablation import Compiler
from harness.verify.diagnose.deviation import Fault
from harness.verify.diagnose.diagnosis import Cause, Diagnosis, Reproduction
from harness.verify.diagnose.reference import array_of
from harness.verify.diagnose.subgraph import (
    ReducedSubgraph,
    Subgraph,
    SubgraphExtractor,
    reduce_subgraph,
    weights_to_inputs,
)
from harness.verify.report.template import rendered

SCRIPT = "reproduce.py"
_TEMPLATES = Path(__file__).parent / "templates"
_PACKAGES = ("apache-tvm", "torch", "numpy")
_OMITTED_TARGET_KEYS = ("tag", "keys", "host", "num-cores")
"""Keys of the target that the script omits, because TVM determines them by itself."""
_MAX_REFERENCE_NODES = 30
"""Number of nodes up to which the script computes the expected value itself."""
_TIME_LIMIT = 600
"""Time limit of the script in seconds."""
_RUN_WITHOUT_PROJECT = (
    "import runpy, sys; sys.modules['harness'] = None; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], None, '__main__')"
)
"""Runs a script that cannot import this project."""

_CONTENT = {
    "relax": "the operators as they were imported, which TVM compiles by its default pipeline",
    "loops": "the operators as loops and kernels, after this project's passes and before memory is planned",
    "calls": "the compiled functions of the program itself, before memory is planned",
    "lowered": "all that this project's pipeline made of the operators, before code is generated",
}


def reproduce(
    diagnosis: Diagnosis, extractor: SubgraphExtractor, calls: Subgraph | None, fault: Fault, compiler: Compiler
) -> Reproduction:
    """Builds the files of a folder that shows the fault of the first divergent kernel.

    Operators are removed and shrunk as long as the fault stays the same. The rest is written in a form that TVM alone
    can compile, and runs once in a process that cannot import this project. If the operators are right outside the
    program, its compiled functions are written instead.

    Args:
        diagnosis: Diagnosis of the divergence.
        extractor: Extracts the operators of the kernel, and those before it if the kernel is right by itself.
        calls: Calls of the program's functions; None if they cannot be written.
        fault: Fault of the result in the program.
        compiler: Compiler of the program.
    """
    assert diagnosis.ablation is not None
    wrong = diagnosis.ablation.wrong
    cause = wrong if wrong in (Cause.IMPORTER, Cause.LEGALIZATION) else Cause.FUSION
    reduced = reduce_subgraph(
        extractor,
        fault,
        lambda subgraph: compiler.run_experiment(subgraph, cause)[0],
        None if cause is Cause.IMPORTER else lambda subgraph: compiler.run_experiment(subgraph, Cause.IMPORTER)[0],
    )
    problems = [] if reduced else ["it could not be cut out: its operators are not wrong in the same way by themselves"]
    forms = [] if reduced is None else [(reduced, *form) for form in _forms(reduced, cause, compiler)]
    if calls is not None:
        forms.append((ReducedSubgraph(calls, fault), "calls", weights_to_inputs(calls.module)))
    for candidate, form, module in forms:
        files = _files(diagnosis, extractor, candidate, form, module, compiler)
        problem = _problem(files, candidate)
        if not problem:
            return Reproduction(files, f"{_size_sentence(candidate)}; {_CONTENT[form]}")
        problems.append(f"with TVM alone, {_CONTENT[form]} do not fail alike: {problem}")
    return Reproduction({}, "; ".join(problems))


def _forms(reduced: ReducedSubgraph, cause: Cause, compiler: Compiler) -> Iterator[tuple[str, tvm.IRModule]]:
    """Yields names (keys of `_CONTENT`) and modules that TVM alone can compile, the most readable first."""
    module = relax.transform.DeadCodeElimination(["main"])(reduced.subgraph.module)
    if cause is Cause.IMPORTER:
        yield "relax", weights_to_inputs(module)
    elif cause is Cause.LEGALIZATION:
        yield "loops", compiler.legalize(module)
    else:
        yield "loops", to_loops(module, compiler.tvm_target, compiler.schedules)
        yield "lowered", lower_module(module, compiler.target, compiler.tvm_target, compiler.schedules)


def _files(
    diagnosis: Diagnosis,
    extractor: SubgraphExtractor,
    reduced: ReducedSubgraph,
    form: str,
    module: tvm.IRModule,
    compiler: Compiler,
) -> dict[str, bytes]:
    """Returns the files of a reproduction by name: the module in a form, its tensors, the script and a description."""
    assert diagnosis.first is not None
    assert diagnosis.ablation is not None
    subgraph, boundary = reduced.subgraph, diagnosis.first.boundary
    text = module.script(show_meta=True)
    as_json = not _parses(text, module)
    reference = _torch_reference(extractor, subgraph)
    tensors = dict(zip(subgraph.names, subgraph.arguments, strict=True))
    tensors |= {} if reference is None else reference.values
    tensors |= {"pytorch": subgraph.torch_value, "float64": subgraph.exact}
    names = [variable.name_hint for variable in module.get_global_vars()]
    target = {
        str(key): value if isinstance(value, bool | int | str) else [str(item) for item in value]
        for key, value in compiler.tvm_target.export().items()
        if key not in _OMITTED_TARGET_KEYS
    }
    values = {
        "title": f"{diagnosis.case.component}: {_operators(reduced)} of {boundary.function} is wrong",
        "form": form,
        "content": _CONTENT[form],
        "as_json": as_json,
        "target": target,
        "arguments": list(subgraph.names),
        "inputs": subgraph.num_inputs,
        "at_load": LOAD if LOAD in names else "",
        "limit_rms": ORACLE_R_RMS,
        "limit_inf": ORACLE_R_INF,
        "reference": "" if reference is None else reference.source,
        "reference_arguments": [] if reference is None else list(reference.arguments),
        "wide": reference is not None and reference.runs_in_float64,
        "component": diagnosis.case.component,
        "node": boundary.node,
        "aten": ", ".join(boundary.operators),
        "operators": _operators(reduced),
        "source": boundary.source.rpartition("site-packages/")[2],
        "versions": f"{', '.join(f'{name} {version(name)}' for name in _PACKAGES)}, Python {platform.python_version()}",
        "seen": f"{diagnosis.first.reason}.",
        "cause": diagnosis.ablation.cause or "undecided",
        "reason": diagnosis.ablation.reason,
        "smaller": _size_sentence(reduced),
    }
    files = {
        "module.py": text.encode(),
        SCRIPT: rendered(_TEMPLATES / f"{SCRIPT}.j2", {}, **values).encode(),
        "README.md": rendered(_TEMPLATES / "README.md.j2", {}, **values).encode(),
        "tensors.safetensors": save({name: np.array(array, order="C") for name, array in tensors.items()}),
    }
    return files | ({"module.json": tvm.ir.save_json(module).encode()} if as_json else {})


def _parses(text: str, module: tvm.IRModule) -> bool:
    """Returns whether TVM parses TVMScript to the same module."""
    try:
        tvm.ir.assert_structural_equal(tvm.script.from_source(text), module, map_free_vars=True)
    except Exception:  # the parser cannot read the script
        return False
    return True


@dataclass(frozen=True)
class _TorchReference:
    """PyTorch's own computation of a result.

    Attributes:
        source: Python source of a function `reference`.
        arguments: Names of the tensors that the function takes.
        values: Those of the tensors that the compiled module does not take.
        runs_in_float64: Whether the function computes the float64 value from float64 tensors.
    """

    source: str
    arguments: tuple[str, ...]
    values: Mapping[str, Array]
    runs_in_float64: bool


def _torch_reference(extractor: SubgraphExtractor, subgraph: Subgraph) -> _TorchReference | None:
    """Returns the nodes as a PyTorch function, if they are few and it computes the expected value of the subgraph."""
    program, values = extractor.torch_module(subgraph.sources)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if len(calls) > _MAX_REFERENCE_NODES or not all(isinstance(value, torch.Tensor) for value in values.values()):
        return None
    known_tensors = dict(zip(subgraph.names, subgraph.arguments, strict=True))
    tensors = {
        name: torch.from_numpy(known_tensors[name]) if name in known_tensors else value
        for name, value in values.items()
    }
    source = re.sub(r";  [\w ]+ = None[^\n]*", "", program.code).strip()
    source = re.sub(r"return \((\w+),\)", r"return \1", source.replace("def forward(self, ", "def reference("))
    namespace: dict[str, Any] = {"torch": torch}
    try:
        exec(source, namespace)
        fp32 = array_of(namespace["reference"](*tensors.values()))
        if fp32.shape != subgraph.torch_value.shape or subgraph.deviation(fp32).is_fault:
            return None
    except Exception:  # extents differ from those of the subgraph, or PyTorch alone lacks an operator
        return None
    try:
        wide = (value.double() if value.is_floating_point() else value for value in tensors.values())
        exact = array_of(namespace["reference"](*wide))
        is_close = np.allclose(exact, subgraph.exact, rtol=1e-9, atol=1e-12)
        runs_in_float64 = exact.dtype == subgraph.exact.dtype and is_close
    except Exception:  # an operator contains a dtype
        runs_in_float64 = False
    other_values = {name: array_of(value) for name, value in values.items() if name not in known_tensors}
    return _TorchReference(source, tuple(tensors), other_values, runs_in_float64)


def _problem(files: Mapping[str, bytes], reduced: ReducedSubgraph) -> str:
    """Runs the script where this project cannot be imported; returns why it does not fail alike, or an empty string."""
    with temporary_folder("reproduce") as name, temporary_folder("reproduce") as working_folder:
        folder, output = Path(name), Path(working_folder) / "output.npy"
        write_files(folder, files)
        command = [sys.executable, "-I", "-c", _RUN_WITHOUT_PROJECT, str(folder / SCRIPT), "--output", str(output)]
        try:
            process = subprocess.run(command, cwd=working_folder, capture_output=True, text=True, timeout=_TIME_LIMIT)
        except subprocess.TimeoutExpired:
            return f"it takes more than {_TIME_LIMIT} s"
        last_line = (process.stderr if process.returncode == 2 else process.stdout).strip().rpartition("\n")[2]
        if process.returncode != 1:
            return f"exit code {process.returncode}: {last_line}"
        if not reduced.fault.same(reduced.subgraph.fault(np.load(output))):
            return f"other elements are wrong: {last_line}"
    return ""


def _operators(reduced: ReducedSubgraph) -> str:
    """Returns the names of the Relax operators, without repetition."""
    values = [binding.value for binding in bindings_of(reduced.subgraph.module["main"])]
    calls = dict.fromkeys(callee(value).removeprefix("relax.") for value in values if isinstance(value, ir.Call))
    return ", ".join(calls)


def _size_sentence(reduced: ReducedSubgraph) -> str:
    halvings = f", extents halved {reduced.halvings} times" if reduced.halvings else ""
    shape = " × ".join(map(str, reduced.subgraph.torch_value.shape))
    return f"cut down to {_operators(reduced)} with a result of {shape}{halvings}, and still wrong at the same elements"
