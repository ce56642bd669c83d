"""Each recipe of `docs/design/adding.md` is followed to the letter in a copy of the project, and keeps its promise.

A model is added in `conformance/models/test_plugged_in_model.py`, a target in `conformance/targets/test_toy_target.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.support import recurrent_segmenter
from harness.core.settings import REPOSITORY
from harness.models.registry import MODELS_VARIABLE

pytestmark = pytest.mark.part

STRATEGY = """
from harness.compiler.lowering.rope.lowering import lower
from harness.compiler.lowering.strategy import Strategy

AGAIN = Strategy(name="again", summary="the general pass, by another name", transform=lower)
"""
MODULE = """

class Negation(nn.Module):
    def forward(self, hs: Tensor) -> tuple[Tensor, ...]:
        return (-hs,)
"""
COMPONENT = """    Component(
        name="negation",
        summary="hidden states to their opposites",
        inputs=("hs",),
        outputs=("negated",),
        build=lambda model: _modules().Negation(),
        samples=single_sample("text_point_box", "hs"),
    ),
)
\"\"\"The components of the image model.\"\"\"
"""
DOUBLE = """

@torch.library.custom_op("conformance::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _convert_double(node: Node, importer: Any) -> Any:
    return importer.block_builder.emit(relax.op.multiply(importer.env[node.args[0]], relax.const(2.0)))


"""
DEFECT = """    Defect(
        name="double",
        title="double is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="It is missing from the table of operators.",
        function=lambda x: double(x),
        args=(torch.ones(2, 3),),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"double\\.default"),
        workaround="A converter.",
        converters={"double.default": _convert_double},
    ),
)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the recipes change, each on top of those before it."""
    copy = tmp_path_factory.mktemp("project")
    for folder in ("harness", "conformance", "docs", "fixtures"):
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(REPOSITORY / folder, copy / folder, symlinks=True, ignore=ignored)
    for file in ("conftest.py", "pyproject.toml", "README.md"):
        shutil.copyfile(REPOSITORY / file, copy / file)
    return copy


def python(project: Path, *arguments: str) -> str:
    """Runs a module in the copy; returns what it printed."""
    variables = os.environ | {
        "PYTHONPATH": str(project),
        MODELS_VARIABLE: recurrent_segmenter.__name__,
        "COLUMNS": "240",
    }
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_a_strategy_is_one_file(project: Path) -> None:
    (project / "harness/compiler/lowering/rope/again.py").write_text(STRATEGY)
    assert "the general pass, by another name" in python(project, "harness", "list")
    python(project, "harness", "verify", "--component", "clip", "--strategy", "again", "--report", "report")
    (case,) = json.loads((project / "report/verification_report.json").read_text())["cases"]
    assert (case["strategy"], case["status"], case["stage"]) == ("again", "passed", "judge")
    assert {output["verdict"] for output in case["outputs"]} == {"strict"}


def test_a_component_is_a_module_and_an_entry_of_the_table(project: Path) -> None:
    components = project / "harness/models/sam3/components"
    with (components / "modules.py").open("a", encoding="utf-8") as file:
        file.write(MODULE)
    table = (components / "image.py").read_text(encoding="utf-8")
    head, _, _ = table.rpartition(")\n")
    (components / "image.py").write_text(head + COMPONENT, encoding="utf-8")
    assert "hidden states to their opposites" in python(project, "harness", "list")
    assert "cases of component negation" in python(project, "pytest", "--markers")
    cases = "from harness.models.selection import select; print(*select(['negation']))"
    (project / "shown.py").write_text(cases)
    assert "component='negation'" in python(project, "shown")


# Every night: it writes the generated pages again, which `conformance/docs` holds to the tables every day.
@pytest.mark.wide
def test_a_defect_is_a_converter_and_an_entry_of_the_table(project: Path) -> None:
    path = project / "harness/compiler/lowering/frontends/torch_export/defects/arithmetic.py"
    functions, begin, table = path.read_text(encoding="utf-8").partition("DEFECTS = (\n")
    path.write_text(functions + DOUBLE + begin + table.removesuffix(")\n") + DEFECT, encoding="utf-8")
    python(project, "docs.generate")
    assert "double is not known" in (project / "docs/reference/defects-torch.md").read_text(encoding="utf-8")
    chosen = ("conformance/lowering/test_frontend_defects.py", "-k", "double or unique")
    done = python(project, "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    assert "passed" in done and "xfailed" in done
