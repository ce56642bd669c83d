"""A folder that shows the fault of one kernel with TVM alone: module, tensors, a script, and what it is about."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tvm
from safetensors.numpy import save
from tvm import ir, relax

from harness.diagnose.compiler import Compiler
from harness.diagnose.diagnosis import Cause, Diagnosis, Reproduction
from harness.diagnose.pieces import Piece, Pieces, without_weights
from harness.diagnose.reducing import Reduced, reduced
from harness.diagnose.reference import array_of
from harness.files import temporary_folder, write_files
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS
from harness.report.template import rendered
from harness.schedules.common.origins import LOAD, bindings_of, callee

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.diagnose.fault import Fault

    Array = npt.NDArray[Any]

SCRIPT = "reproduce.py"
_TEMPLATES = Path(__file__).parent / "templates"
_PACKAGES = ("apache-tvm", "torch", "numpy")
_NOT_OF_TARGET = ("tag", "keys", "host", "num-cores")
"""What the script does not say of the target: TVM finds it out by itself."""
_LONGEST = 30
"""Nodes up to which the script computes the expected value itself."""
_TIME_LIMIT = 600
"""Seconds that the script may take."""
_ALONE = (
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


def reproduce(found: Diagnosis, pieces: Pieces, calls: Piece | None, fault: Fault, compiler: Compiler) -> Reproduction:
    """Makes the files of a folder that shows what is wrong with the first divergent kernel.

    Operators are made fewer and smaller for as long as the fault is the same, then written as what TVM alone can
    compile, and run once in a process that cannot import this project. Where operators are right outside of the
    program, its compiled functions are written.

    Args:
        found: What diverges, and why.
        pieces: Cuts out the operators of the kernel; those before it as well, where the kernel is right by itself.
        calls: The calls of the program's own functions; None if they cannot be written.
        fault: What is wrong with its result in the program.
        compiler: What the program is compiled for.
    """
    assert found.ablation is not None
    wrong = found.ablation.wrong
    way = wrong if wrong in (Cause.IMPORTER, Cause.LEGALIZATION) else Cause.FUSION
    small = reduced(
        pieces,
        fault,
        lambda piece: compiler.result(piece, way)[0],
        None if way is Cause.IMPORTER else lambda piece: compiler.result(piece, Cause.IMPORTER)[0],
    )
    problems = [] if small else ["it could not be cut out: its operators are not wrong in the same way by themselves"]
    forms = [] if small is None else [(small, *form) for form in _forms(small, way, compiler)]
    if calls is not None:
        forms.append((Reduced(calls, fault), "calls", without_weights(calls.module)))
    for shown, form, module in forms:
        files = _files(found, pieces, shown, form, module, compiler)
        problem = _problem(files, shown)
        if not problem:
            return Reproduction(files, f"{_smaller(shown)}; {_CONTENT[form]}")
        problems.append(f"with TVM alone, {_CONTENT[form]} do not fail alike: {problem}")
    return Reproduction({}, "; ".join(problems))


def _forms(small: Reduced, way: Cause, compiler: Compiler) -> Iterator[tuple[str, tvm.IRModule]]:
    """Yields the module as TVM alone can compile it: the form that is easiest to read first."""
    from harness.schedules.cpu.pipeline import to_loops
    from harness.targets.compiling import lower_module

    module = relax.transform.DeadCodeElimination(["main"])(small.piece.module)
    if way is Cause.IMPORTER:
        yield "relax", without_weights(module)
    elif way is Cause.LEGALIZATION:
        yield "loops", compiler.legalized(module)
    else:
        yield "loops", to_loops(module, compiler.tvm_target, compiler.schedules)
        yield "lowered", lower_module(module, compiler.target, compiler.tvm_target, compiler.schedules)


def _files(
    found: Diagnosis, pieces: Pieces, small: Reduced, form: str, module: tvm.IRModule, compiler: Compiler
) -> dict[str, bytes]:
    assert found.first is not None
    assert found.ablation is not None
    piece, boundary = small.piece, found.first.boundary
    text = module.script(show_meta=True)
    as_json = not _parses(text, module)
    reference = _reference(pieces, piece)
    tensors = dict(zip(piece.names, piece.arguments, strict=True))
    tensors |= {} if reference is None else reference.values
    tensors |= {"pytorch": piece.torch_value, "float64": piece.exact}
    names = [variable.name_hint for variable in module.get_global_vars()]
    target = {
        str(key): _plain(value) for key, value in compiler.tvm_target.export().items() if key not in _NOT_OF_TARGET
    }
    values = {
        "title": f"{found.case.component}: {_operators(small)} of {boundary.function} is wrong",
        "form": form,
        "content": _CONTENT[form],
        "as_json": as_json,
        "target": target,
        "arguments": list(piece.names),
        "inputs": piece.inputs,
        "at_load": LOAD if LOAD in names else "",
        "limit_rms": ORACLE_R_RMS,
        "limit_inf": ORACLE_R_INF,
        "reference": "" if reference is None else reference.source,
        "reference_arguments": [] if reference is None else list(reference.arguments),
        "wide": reference is not None and reference.wide,
        "component": found.case.component,
        "node": boundary.node,
        "aten": ", ".join(boundary.operators),
        "operators": _operators(small),
        "source": boundary.source.rpartition("site-packages/")[2],
        "versions": f"{', '.join(f'{name} {version(name)}' for name in _PACKAGES)}, Python {platform.python_version()}",
        "seen": f"{found.first.reason}.",
        "cause": found.ablation.cause or "undecided",
        "reason": found.ablation.reason,
        "smaller": _smaller(small),
    }
    files = {
        "module.py": text.encode(),
        SCRIPT: rendered(_TEMPLATES / f"{SCRIPT}.j2", {}, **values).encode(),
        "README.md": rendered(_TEMPLATES / "README.md.j2", {}, **values).encode(),
        "tensors.safetensors": save({name: np.array(array, order="C") for name, array in tensors.items()}),
    }
    return files | ({"module.json": tvm.ir.save_json(module).encode()} if as_json else {})


def _plain(value: Any) -> bool | int | str | list[str]:
    """Returns an attribute of a target as Python writes it."""
    if isinstance(value, bool | int | str):
        return value
    return [str(each) for each in value]


def _parses(text: str, module: tvm.IRModule) -> bool:
    """Returns whether TVM makes the same module of TVMScript again."""
    try:
        tvm.ir.assert_structural_equal(tvm.script.from_source(text), module, map_free_vars=True)
    except Exception:  # whatever the parser cannot read
        return False
    return True


@dataclass(frozen=True)
class _Reference:
    """PyTorch's own computation of a result.

    Attributes:
        source: A function `reference` in Python.
        arguments: Names of the tensors that it takes.
        values: Those of them that the compiled module does not take.
        wide: Whether it computes the float64 value from float64 tensors.
    """

    source: str
    arguments: tuple[str, ...]
    values: Mapping[str, Array]
    wide: bool


def _reference(pieces: Pieces, piece: Piece) -> _Reference | None:
    """Returns the nodes as a function of PyTorch, if there are few and it computes what the piece is held to."""
    program, values = pieces.program(piece.sources)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    if len(calls) > _LONGEST or not all(isinstance(value, torch.Tensor) for value in values.values()):
        return None
    given = dict(zip(piece.names, piece.arguments, strict=True))
    tensors = {name: torch.from_numpy(given[name]) if name in given else value for name, value in values.items()}
    source = re.sub(r";  [\w ]+ = None[^\n]*", "", program.code).strip()
    source = re.sub(r"return \((\w+),\)", r"return \1", source.replace("def forward(self, ", "def reference("))
    known: dict[str, Any] = {"torch": torch}
    try:
        exec(source, known)
        fp32 = _numbers(known["reference"](*tensors.values()))
        if fp32.shape != piece.torch_value.shape or piece.judged(fp32).excess > 1:
            return None
    except Exception:  # extents that are no longer those of the piece, operators that PyTorch alone has not
        return None
    try:
        exact = _numbers(known["reference"](*map(_wide, tensors.values())))
        wide = exact.dtype == piece.exact.dtype and np.allclose(exact, piece.exact, rtol=1e-9, atol=1e-12)
    except Exception:  # a dtype that is written into an operator
        wide = False
    own = {name: array_of(value) for name, value in values.items() if name not in given}
    return _Reference(source, tuple(tensors), own, wide)


def _numbers(value: torch.Tensor) -> Array:
    array: Array = value.detach().numpy()
    return array


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def _problem(files: Mapping[str, bytes], small: Reduced) -> str:
    """Runs the script where this project cannot be imported; returns why it does not fail alike, or nothing."""
    with temporary_folder("reproduce") as name, temporary_folder("reproduce") as elsewhere:
        folder, output = Path(name), Path(elsewhere) / "output.npy"
        write_files(folder, files)
        command = [sys.executable, "-I", "-c", _ALONE, str(folder / SCRIPT), "--output", str(output)]
        try:
            done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=_TIME_LIMIT)
        except subprocess.TimeoutExpired:
            return f"it takes more than {_TIME_LIMIT} s"
        last = (done.stderr if done.returncode == 2 else done.stdout).strip().rpartition("\n")[2]
        if done.returncode != 1:
            return f"exit code {done.returncode}: {last}"
        if not small.fault.same(small.piece.fault(np.load(output))):
            return f"other elements are wrong: {last}"
    return ""


def _operators(small: Reduced) -> str:
    """Returns the names of the Relax operators, each once."""
    calls = [binding.value for binding in bindings_of(small.piece.module["main"]) if isinstance(binding.value, ir.Call)]
    return ", ".join(dict.fromkeys(callee(call).removeprefix("relax.") for call in calls))


def _smaller(small: Reduced) -> str:
    halved = f", extents halved {small.halved} times" if small.halved else ""
    shape = " × ".join(map(str, small.piece.torch_value.shape))
    return f"cut down to {_operators(small)} with a result of {shape}{halved}, and still wrong at the same elements"
