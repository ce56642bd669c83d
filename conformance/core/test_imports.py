"""What import-linter cannot say, since it knows other packages as a whole: who touches which part of TVM and torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tvm.relax  # noqa: F401  (registers its operators)
from tvm import ir

import harness
from harness.compiler import tir

PACKAGE = Path(harness.__file__).parent


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute of an attribute of a name; empty for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def touched(source: str) -> Iterator[str]:
    """Every name that a module imports, or reaches through what it imported, in full."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        name, _, rest = dotted(node).partition(".")
        if rest and name in known:
            yield f"{known[name]}.{rest}"


@cache
def names() -> dict[str, frozenset[str]]:
    """What each module of the package touches."""
    return {
        path.relative_to(PACKAGE).as_posix(): frozenset(touched(path.read_text(encoding="utf-8")))
        for path in PACKAGE.rglob("*.py")
    }


def users(*prefixes: str) -> set[str]:
    """Modules of the package that touch what has one of these names, or is below it."""
    return {
        module
        for module, touched_names in names().items()
        for name in touched_names
        if any(f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)
    }


def test_programs_are_exported_and_imported_by_the_frontends_alone() -> None:
    found = users("tvm.relax.frontend", "torch.export")
    assert found and {path for path in found if not path.startswith("compiler/lowering/")} == set()


def test_one_module_names_the_builder_of_kernels() -> None:
    """TVM's next cut renames what is there."""
    assert users("tvm.script.ir_builder") == {"compiler/tir.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.export",
        "from torch import export",
        "import torch\ntorch.export.export(m, a)",
        "import torch.export as e",
    ],
)
def test_whoever_touches_it_is_found(source: str) -> None:
    assert any(f"{name}.".startswith("torch.export.") for name in touched(source))


ENVIRONMENT = {
    # Defaults of options, for the commands and pytest; what is below gets values.
    "core/processors.py": "the defaults of --cpu and --cuda-arch",
    # What belongs to a process: a border sets it, and the libraries that the process loads obey.
    "core/processes/threads.py": "the number of threads, for TVM and OpenMP; sets variables for others",
    "core/processes/memory.py": "how the C library keeps freed memory",
    "core/processes/call.py": "what a new process starts with",
    "core/processes/template.py": "that a process which is forked sees no GPU",
    "core/processes/child.py": "what a process that was forked takes over from its caller",
    "app/segment/workers.py": "that the threads of workers are not bound to the same CPUs",
    "core/cluster.py": "what Ray logs and where its cluster is",
    "runtime/threads.py": "the number of threads, where only the runtime is installed",
    "compiler/doctor/probes.py": "what a parallel loop does without the variables",
    "compiler/doctor/diagnosis.py": "which variables are set and have no effect",
    # Where something is on this machine, as PATH says where programs are.
    "models/registry.py": "modules that add models",
    "core/files.py": "the folder of the cache",
    "compiler/targets/linking.py": "the C compiler",
    "compiler/targets/cuda.py": "the CUDA compiler",
    "compiler/targets/system_cpu.py": "TVM's libraries",
}
"""Module → what it reads or writes of the environment; `docs/design/architecture.md` says why."""


def test_the_environment_is_touched_where_the_table_says_and_nowhere_else() -> None:
    assert users("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv") == ENVIRONMENT.keys()


def test_names_of_the_low_level_ir_have_types() -> None:
    """The stub file gives types to every name that kernels may use, and to no other."""
    typed = set()
    for statement in ast.parse(Path(tir.__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "tvm.tirx":
            typed |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef):
            typed.add(statement.name)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            typed.add(statement.target.id)
    given = {name for name in vars(tir) if not name.startswith("_")}
    assert {name for name in typed if not name.startswith("_")} == given


NO_OPERATORS = {"relax.call_", "relax.op.power", "relax.op.vision.roi_align"}
"""A prefix of operators' names, and functions that the frontends' importers call."""
ATTRIBUTES = {"tirx.is_scheduled", "tirx.noalias", "tirx.use_dyn_shared_memory"}
"""Attributes of functions of the low-level IR."""


def test_operators_that_are_named_exist() -> None:
    """A name that TVM has changed would be found nowhere, and what depends on it would never happen."""
    root = PACKAGE.parent
    paths = [path for folder in ("harness", "conformance", "perf") for path in (root / folder).rglob("*.py")]
    named = {
        node.value
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(tirx|prim|relax)(\.[a-z_0-9]+)+", node.value)
    }
    assert len(named) > 50
    assert named - set(ir.Op.list_op_names()) == NO_OPERATORS | ATTRIBUTES
