"""Renders the pages on defects from their registries: an overview, and one for each frontend."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence

import torch

from harness.compiler.lowering.frontends.defect import TESTED_VERSION, Defect, Symptom
from harness.compiler.lowering.frontends.onnx.defects import DEFECTS as ONNX_DEFECTS
from harness.compiler.lowering.frontends.onnx.exporting import OPSET
from harness.compiler.lowering.frontends.torch_export.defects import DEFECTS

_MAX_ELEMENTS = 12
"""Largest number of elements of a tensor whose values a page has."""


_INTRODUCTION = f"""# Defects of TVM's PyTorch frontend

Seen in apache-tvm {TESTED_VERSION}, with `torch.export` and `tvm.relax.frontend.torch.from_exported_program`. The
workarounds are in `harness/compiler/lowering/frontends/torch_export/defects/`. The
[overview](../evidence/defects.md) says how each is tested.
"""

_ONNX_INTRODUCTION = f"""# Defects on the way through ONNX

Seen in apache-tvm {TESTED_VERSION} and PyTorch's exporter (`torch.onnx.export(dynamo=True)`, opset {OPSET}), with
`tvm.relax.frontend.onnx.from_onnx`. The workarounds are in `harness/compiler/lowering/frontends/onnx/defects/`. The
[overview](../evidence/defects.md) says how each is tested.
"""


def overview() -> str:
    """Returns the page that counts the defects of both frontends, and says how they are tested."""
    rows = [
        f"| [{name}](../reference/{page}) | {len(defects)} | "
        f"{' | '.join(str(_count(defects, kind)) for kind in Symptom)} |"
        for name, page, defects in (
            ("PyTorch (torch.export)", "defects-torch.md", DEFECTS),
            ("ONNX", "defects-onnx.md", ONNX_DEFECTS),
        )
    ]
    table = "\n".join([f"| frontend | defects | {' | '.join(Symptom)} |", "| --- | ---: | ---: | ---: | ---: |", *rows])
    wrong = [defect for defect in DEFECTS if defect.raw.symptom is Symptom.WRONG_RESULT and "NaN" not in defect.title]
    worst = "\n".join(f"- [{defect.title}](../reference/defects-torch.md#{defect.name})" for defect in wrong)
    return f"""# Defects

Importing SAM 3 found these defects in apache-tvm {TESTED_VERSION} and in PyTorch's ONNX exporter. All of them are
worked around.

{table}

Each defect is data: a reproduction of a line, the symptom in the unmodified frontend, the cause, and the workaround.
This page is generated: `python -m docs.generate`.

## The tests of a defect

`conformance/lowering/test_frontend_defects.py` runs every reproduction:

- The unmodified frontend must fail as described. A release that repairs a defect fails this test, and then the
  workaround is deleted.
- With the workaround, the result must be PyTorch's.

`conformance/lowering/test_operators.py` holds every operator that SAM 3's components use to PyTorch and to float64.
[Operators](../reference/operators.md) has the status of each.

Faults of TVM's backend without a workaround are strict expected failures of the suite:
`grep -rn "mark.xfail" conformance`.

## Wrong results without an error

A rejected program is noticed, and a wrong number may not be. These defects of the PyTorch frontend give wrong results
silently. {_count(DEFECTS, Symptom.WRONG_RESULT) - len(wrong)} more concern NaN alone.

{worst}

## Report one

The page of each frontend has a reproduction that needs PyTorch and TVM alone.
[Adding](../design/adding.md#an-importer-or-compiler-defect) says how to add a defect.
"""


def _count(defects: Sequence[Defect], symptom: Symptom) -> int:
    return sum(defect.raw.symptom is symptom for defect in defects)


def torch_page() -> str:
    """Returns the page on the defects of TVM's PyTorch frontend."""
    return _page(_INTRODUCTION, "torch_export", "grid_sample_layout", DEFECTS, "Unmodified TVM")


def onnx_page() -> str:
    """Returns the page on the defects on the way through ONNX."""
    return _page(_ONNX_INTRODUCTION, "onnx", "resize_antialias", ONNX_DEFECTS, "Unmodified")


def _page(introduction: str, package: str, example: str, defects: Sequence[Defect], unmodified: str) -> str:
    """Returns a page.

    Args:
        introduction: Text before the table, in Markdown.
        package: Name of the frontend's package.
        example: Name of the defect in the instructions to run a reproduction.
        defects: The defects, in the order of the page.
        unmodified: Name of the frontend without workarounds.
    """
    rows = [f"| [{defect.title}](#{defect.name}) | {defect.raw.symptom} | `{defect.location}` |" for defect in defects]
    table = "\n".join(["| defect | symptom | where |", "| --- | --- | --- |", *rows])
    sections = "\n".join(_section(defect, unmodified) for defect in defects)
    return f"""{introduction}
This page is generated: `python -m docs.generate`.

{table}

## Running a reproduction

    from harness.compiler.lowering.frontends.{package}.defects import DEFECTS
    from harness.compiler.lowering.frontends.{package}.importing import import_module, import_raw
    from harness.compiler.lowering.frontends.running import run_raw, run_repaired, run_torch

    defect = next(defect for defect in DEFECTS if defect.name == "{example}")
    module, args = defect.reproduction()
    run_torch(module, args), run_repaired(import_module, module, args), run_raw(import_raw, module, args)

{sections}"""


def _section(defect: Defect, unmodified: str) -> str:
    """Returns the section on a defect, with the arguments and the source of its function."""
    names = inspect.signature(defect.function).parameters
    inputs = "\n".join(f"{name} = {_text(value)}" for name, value in zip(names, defect.args, strict=True))
    reproduction = textwrap.indent(f"{inputs}\n{_source(defect.function)}", "    ")
    return f"""## {defect.name}

{defect.title}.

{defect.description}

{reproduction}

- {unmodified}: {_raw(defect)}
- Here: {defect.workaround}
"""


def _source(function: Callable[..., object]) -> str:
    """Returns the expression that a lambda computes, or the source of another function."""
    module, line = inspect.getmodule(function), function.__code__.co_firstlineno
    assert module is not None
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Lambda) and node.lineno == line:
            return ast.unparse(node.body)
    return inspect.getsource(function).rstrip()


def _text(value: torch.Tensor) -> str:
    if value.numel() == 0:
        return f"torch.zeros({list(value.shape)})"
    if value.numel() <= _MAX_ELEMENTS:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    return f"torch.randn({list(value.shape)})" if value.dtype.is_floating_point else f"…  # {list(value.shape)}"


def _raw(defect: Defect) -> str:
    raw = defect.raw
    if raw.symptom is Symptom.REJECTED:
        return f"`{raw.error}`, with a message that matches `{raw.message}`."
    return f"{raw.wrong}."
