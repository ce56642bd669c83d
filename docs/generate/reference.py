"""Renders the reference: every page from what the code itself says."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from harness.core.settings import FIXTURES, REPOSITORY

CLAIMS = Path(__file__).with_name("claims.toml")

SETTINGS = {
    "Environment variables": (
        "harness.core.files:CACHE_VARIABLE",
        "harness.core.processes.threads:OPTION_VARIABLE",
        "harness.core.processors:CPU_VARIABLE",
        "harness.core.processors:CUDA_VARIABLE",
        "harness.models.registry:MODELS_VARIABLE",
    ),
    "Limits of a verdict": (
        "harness.parity.metrics:RTOL",
        "harness.parity.metrics:ATOL",
        "harness.parity.verdict:MAX_R_RMS",
        "harness.parity.verdict:MAX_R_INF",
        "harness.parity.verdict:ORACLE_R_RMS",
        "harness.parity.verdict:ORACLE_R_INF",
    ),
    "Sizes of the caches, in bytes": (
        "harness.parity.cache:DEFAULT_LIMIT_BYTES",
        "harness.compiler.targets.objects:LIMIT_BYTES",
    ),
}
"""Constants on the page of settings, by heading."""


def commands() -> str:
    """Returns the page of the commands, which Typer writes."""
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from harness.cli.main import app

    command: typing.Any = get_command(app)
    # Parsing adds the options of the default model.
    command.commands["compile"].make_context("compile", ["--out", "DIR"], resilient_parsing=True)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="sam3-tvm")
    return _page("Commands", "`sam3-tvm COMMAND --help` prints the same.", *text.splitlines()[1:])


def python() -> str:
    """Returns the page of the public names of `harness.runtime`."""
    import harness.runtime

    sections = [_class(name, getattr(harness.runtime, name)) for name in harness.runtime.__all__]
    session = importlib.import_module("harness.runtime.sam3.video.session").Session
    note = "These are the public names of `harness.runtime`, which needs neither PyTorch nor TVM's compiler."
    return _page("Python API", note, *sections, _class("Session", session, "`Sam3.start_session` returns it."))


def entry_points() -> str:
    """Returns the page of the functions in a compiled folder, from the docstrings of their builders."""
    from harness.models.sam3.deployed import entry_points as module

    builders = [function for _, function in _functions(module) if function.__annotations__["return"] == "Program"]
    sections = [f"## {function.__name__}\n\n{_text(function)}\n" for function in builders]
    kernels = [_constant(f"harness.models.sam3.deployed.deployable:{name}") for name in ("PREPROCESS", "RESIZE_MASKS")]
    compiled = [f"## {name.strip('`').lower()}\n\nMaps {meaning}\n" for name, _, meaning, _ in kernels]
    note = (
        "A compiled folder's library has these functions. Its `manifest.json` has the exact shapes. A folder that was "
        "compiled with `--clicks 0`, or without `--video`, lacks those of clicks or videos."
    )
    return _page("Entry points", note, *compiled, *sections)


def settings() -> str:
    """Returns the page of environment variables, limits and sizes, from the constants and their descriptions."""
    sections = []
    for heading, names in SETTINGS.items():
        rows: list[tuple[str, ...]] = [_constant(name) for name in names]
        titles: tuple[str, ...] = ("constant", "value", "meaning", "module")
        if heading == "Environment variables":
            rows, titles = [row[1:] for row in rows], ("variable", "meaning", "module")
        sections.append(f"## {heading}\n\n{_table(titles, rows)}\n")
    return _page("Settings", "Options of commands override environment variables.", *sections)


def expectations() -> str:
    """Returns the page of the cases that are not expected to be strict."""
    from harness.models.registry import models

    files = [file for file in (model.expectations for model in models().values()) if file is not None]
    sections = []
    for entry in [entry for file in files for entry in tomllib.loads(file.read_text(encoding="utf-8"))["expect"]]:
        names = ("component", "strategy", "target", "scale", "precision", "frontend", "weights", "outputs")
        outcome = (
            "judged by the oracle" + (", or strict" if entry.get("varies") else "")
            if "judge" in entry
            else f"{entry['status']} in {entry['stage']}" + (f", `{entry['error']}`" if "error" in entry else "")
        )
        facts = [(name, _names(entry[name])) for name in names if name in entry]
        title = f"{_names(entry['component'])} · {_names(entry['strategy'])}"
        sections.append(f"## {title}\n\n{_table(('', 'value'), [*facts, ('outcome', outcome)])}\n\n{entry['why']}\n")
    sources = " and ".join(f"`{file.relative_to(REPOSITORY).as_posix()}`" for file in files)
    note = (
        f"{sources} name every case that is not expected to be strict. An unexpected failure fails a run, and so does "
        "an unexpected pass."
    )
    return _page("Expectations", note, *sections)


def exit_codes() -> str:
    """Returns the page of exit codes, from the docstrings of the commands."""
    from harness.cli.main import COMMANDS, INTERRUPTED

    rows = [
        (0, "every command", "It did what was asked."),
        (1, "other commands", "It crashed. This is a defect: the traceback belongs in a bug report."),
        (2, "every command", "Wrong usage or environment. One sentence on stderr says what to do."),
        (INTERRUPTED, "every command", "Ctrl-C."),
        (143, "every command", "SIGTERM."),
        (129, "every command", "SIGHUP."),
    ]
    for name, command in COMMANDS.items():
        if found := re.search(r"Exit code (0: .*)", _text(command), re.DOTALL):
            parts = re.split(r"\b([0-9]): ", " ".join(found[1].split()))[1:]
            meanings = dict(zip(parts[::2], parts[1::2], strict=True))
            rows += [(int(code), f"`{name}`", meaning.strip()) for code, meaning in meanings.items() if code != "2"]
    return _page("Exit codes", "", _table(("code", "command", "meaning"), rows))


def report_schema() -> str:
    """Returns the page of the JSON report, from the description in the module that writes it."""
    from harness.verify.report.verification import document

    note = "`sam3-tvm verify` writes `verification_report.json`. The Markdown and HTML pages are rendered from it."
    return _page("The JSON report", note, _text(document))


def operators() -> str:
    """Returns the page of the ATen operators of SAM 3, with the defects of TVM's importer that concern each."""
    from harness.compiler.lowering.frontends.torch_export.defects import DEFECTS

    concerned: dict[str, list[str]] = {}
    for defect in DEFECTS:
        for name in _operators_of(defect):
            concerned.setdefault(name, []).append(f"[{defect.name}](defects-torch.md#{defect.name})")
    calls = json.loads((FIXTURES / "operators.json").read_text(encoding="utf-8"))["operators"]
    rows = [
        (f"`{name}`", len(calls[name]), "worked around" if _base(name) in concerned else "as imported", defects)
        for name in calls
        for defects in [", ".join(concerned.get(_base(name), ()))]
    ]
    repaired = sum(row[2] == "worked around" for row in rows)
    note = f"""SAM 3's components call {len(rows)} ATen operators. TVM's importer takes {len(rows) - repaired} of them
as they are, and {repaired} have a defect that is worked around. `conformance/lowering/test_operators.py` holds every
operator to PyTorch and float64. *Calls* counts the distinct shapes and arguments.

SAM 3 uses no deformable attention: no component calls an operator of it."""
    return _page("Operators", note, _table(("operator", "calls", "status", "defects"), rows))


def claims() -> str:
    """Returns the page of what the project claims, with the test that proves each claim."""
    rows = [
        (claim["claim"], f"`{claim['test'].replace('::', '` `')}`")
        for claim in tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claims"]
    ]
    note = "Run a test with `.venv/bin/pytest FILE -k NAME`."
    return _page("Claims and their tests", note, _table(("claim", "test"), rows))


def _operators_of(defect: typing.Any) -> set[str]:
    """Returns the operators that a defect concerns: those of its converters, or the last one of its reproduction."""
    from harness.compiler.lowering.frontends.exporting import export_program

    if defect.converters:
        return {_base(name) for name in defect.converters}
    program = export_program(*defect.reproduction())
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return {_base(name) for name in called[-1:] if "getitem" not in name} or {_base(called[0])}


def _base(operator: str) -> str:
    """Returns an operator's name without namespace and overload: `aten.add.Tensor` becomes `add`."""
    name = operator.removeprefix("aten.").removeprefix("torchvision.").partition(".")[0]
    return {"max_pool2d_with_indices": "max_pool2d"}.get(name, name)


def _class(name: str, of: typing.Any, note: str = "") -> str:
    """Returns the section of a class: its description, then each public method and property."""
    lines = [f"## {name}", "", note, "", _text(of), ""]
    for member, value in vars(of).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        function = getattr(function, "fget", None) or getattr(function, "func", None) or function
        if member.startswith("_") or not inspect.isfunction(function):
            continue
        is_property = not inspect.isfunction(value) and not isinstance(value, classmethod | staticmethod)
        signature = "" if is_property else str(inspect.signature(function)).replace("'", "")
        lines += [f"### {name}.{member}", "", f"    {member}{signature}", "", _text(function), ""]
    return "\n".join(lines)


def _text(of: object) -> str:
    """Returns a docstring in Markdown: sections of Google's style become lists."""
    text = inspect.getdoc(of) or ""
    text = re.sub(r"^Example::$", "For example:", text, flags=re.MULTILINE)

    def items(match: re.Match[str]) -> str:
        entries = re.split(r"\n(?= {4}\S)", match[2].rstrip("\n"))
        parts = [" ".join(entry.split()).partition(": ") for entry in entries]
        return (
            f"{match[1]}:\n\n"
            + "\n".join(f"- `{before}`: {after}" if after else f"- {before}" for before, _, after in parts)
            + "\n\n"
        )

    headings = "Args|Attributes|Raises|Returns|Yields"
    return re.sub(rf"^({headings}):\n((?:    .*\n?)+)", items, text, flags=re.MULTILINE)


def _functions(module: ModuleType) -> list[tuple[str, Callable[..., object]]]:
    """Returns the public functions that a module defines, in their order."""
    found = [(name, value) for name, value in vars(module).items() if inspect.isfunction(value)]
    return [(name, value) for name, value in found if value.__module__ == module.__name__ and name[0] != "_"]


def _constant(path: str) -> tuple[str, str, str, str]:
    """Returns name, value, description and module of a constant; the description is the string below it."""
    module_name, _, name = path.partition(":")
    module = importlib.import_module(module_name)
    body = ast.parse(inspect.getsource(module)).body
    for statement, after in pairwise(body):
        targets = getattr(statement, "targets", [])
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            value = getattr(module, name)
            return f"`{name}`", f"`{value}`", " ".join(str(after.value.value).split()), f"`{module_name}`"
    raise LookupError(f"{path} has no description: write a string below the constant")


def _names(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "all" if text == "*" else text


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _page(title: str, note: str, *sections: str) -> str:
    body = "\n".join(sections)
    text = f"# {title}\n\n{note}\n\nThis page is generated: `python -m docs.generate`.\n\n{body}\n"
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
