"""`sam3-tvm budget` as a user meets it, on a small network: interrupted, gone on with, and its file used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conformance.support import small_network
from conformance.support.commands import run_command
from conformance.support.sentences import sentence
from conformance.support.small_network import GROUPS
from harness.cli.main import app
from harness.cli.options import chosen_groups
from harness.compiler.deployment.compiling import compile_into
from harness.compiler.deployment.deployable import ArtifactSpec
from harness.compiler.deployment.packing import pack_into
from harness.core.budget import Budget
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import Settings
from harness.models.selection import select
from harness.runtime.manifest import read_manifest

BUDGET = ("budget", "--component", "perceptron", "--limit", "0.7")
INTERRUPTED = 130


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "harness", *arguments]


def environment(**changed: str) -> dict[str, str]:
    return {**os.environ, "SAM3_TVM_MODELS": small_network.__name__, "COLUMNS": "200", **changed}


def sam3_tvm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, environment=environment())


def interrupted(*arguments: str, log: Path) -> int:
    """Stops a command as Ctrl-C does once something was measured; its exit code."""
    process = subprocess.Popen(command(*arguments), env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (log.exists() and log.read_text().strip()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    return process.wait(timeout=60)


class Found:
    """A budget that was interrupted and gone on with."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "budget.json"
        self.log = folder / "budget.measurements.jsonl"
        self.code = interrupted(*BUDGET, "--out", str(self.file), log=self.log)
        self.was_there = self.file.exists()
        self.before = self.log.read_text()
        self.done = sam3_tvm(*BUDGET, "--out", str(self.file))

    @property
    def written(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("budget"))


@pytest.mark.wide
def test_an_interrupted_search_goes_on_where_it_was(found: Found) -> None:
    assert found.code == INTERRUPTED and not found.was_there
    assert found.done.returncode == 0, found.done.stdout + found.done.stderr
    assert found.log.read_text().startswith(found.before)
    earlier, lines = len(found.before.splitlines()), found.log.read_text().splitlines()
    made = len(lines) - earlier
    assert earlier and f"{made} measurements were made, {earlier} are from an earlier run." in found.done.stdout
    assert len({tuple(json.loads(line)["half"]) for line in lines}) == len(lines), "nothing is measured twice"


def test_the_limit_is_held_and_no_group_more_fits(found: Found) -> None:
    written, measured = found.written, found.written["measured"]
    assert written["component"] == "perceptron" and written["precision"] == "bf16" and written["limit"] == 0.7
    errors = measured["outputs"]
    assert set(errors) == {"features", "scales"}
    assert max(each["chosen"] for each in errors.values()) <= 0.7 < max(each["half"] for each in errors.values())
    assert max(each["fp32"] for each in errors.values()) < 1e-3
    assert 0 < len(written["float32"]) < len(GROUPS) and set(written["float32"]) < set(GROUPS)
    assert [group["name"] for group in measured["groups"]] == list(GROUPS)
    assert [group["operations"] for group in measured["groups"]] == [
        2 * small_network.TOKENS * depth * columns for depth, columns in ((64, 128), (128, 64), (64, 96), (64, 64))
    ]
    left_out = [group for group in measured["groups"] if group["float32"]]
    for group in left_out:
        alone = {name: errors[name]["chosen"] ** 2 + group["r_rms"][name] ** 2 for name in errors}
        assert max(alone.values()) > 0.65**2, "it would have fitted beside the others"


def test_squared_errors_of_groups_add(found: Found) -> None:
    measured = found.written["measured"]
    by_name = {group["name"]: group["r_rms"] for group in measured["groups"]}
    assert by_name["head"]["scales"] == by_name["scale"]["features"] == 0, "one head reads nothing of the other"
    for output, errors in measured["outputs"].items():
        together = sum(group[output] ** 2 for group in by_name.values()) ** 0.5
        assert errors["half"] == pytest.approx(together, rel=0.15)
    front = measured["front"]
    assert [point["half"] for point in front][:: len(front) - 1] == [0, 4]
    assert [point["seconds"] for point in front] == sorted((point["seconds"] for point in front), reverse=True)
    assert [point["predicted"] for point in front] == sorted(point["predicted"] for point in front)
    for point in front[1:]:
        assert point["measured"] == pytest.approx(point["predicted"], rel=0.15)


def test_verify_takes_the_file(found: Found, tmp_path: Path) -> None:
    verify = ("verify", "--component", "perceptron", "--budget", str(found.file), "--report", str(tmp_path / "report"))
    done = sam3_tvm(*verify, "--precision", "bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "report" / "verification_report.json").read_text())["cases"]
    chosen = {name: each["chosen"] for name, each in found.written["measured"]["outputs"].items()}
    assert {output["name"]: output["r_rms"] for output in result["outputs"]} == pytest.approx(chosen, rel=1e-6)
    assert f"--budget {found.file}" in result["repro"]
    kept = f"{len(found.written['float32'])} groups of products of perceptron, by {found.file}"
    assert kept in (tmp_path / "report" / "VERIFICATION_REPORT.md").read_text()


@pytest.mark.wide
def test_explain_takes_the_file(found: Found, tmp_path: Path) -> None:
    budget, document = tmp_path / "budget.json", tmp_path / "explained.json"
    budget.write_text(json.dumps(found.written | {"float32": ["trunk.2"]}))
    explain = ("explain", "--component", "perceptron", "--precision", "bf16", "--json", str(document))
    rounded = []
    for arguments in ((), ("--budget", str(budget))):
        done = sam3_tvm(*explain, *arguments)
        assert done.returncode == 0, done.stderr
        (case,) = json.loads(document.read_text())["cases"]
        assert case["precision"] == "bf16"
        products = [operator for operator in case["operators"] if operator["name"] == "matmul"]
        rounded.append(sum(any("bfloat16" in shape for shape in product["inputs"]) for product in products))
    assert rounded == [len(products), len(products) - 1]


def test_compile_takes_the_file(found: Found, tmp_path: Path) -> None:
    budget, out = tmp_path / "budget.json", tmp_path / "compiled"
    budget.write_text(json.dumps(found.written | {"float32": ["trunk.2"]}))
    model = ("--model", small_network.NAME, "--scale", "shallow", "--precision", "bf16")
    done = sam3_tvm("compile", *model, "--out", str(out), "--budget", str(budget))
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_manifest(out).float32 == ("trunk.2",)
    deployable = small_network.MODEL.deployable
    assert deployable is not None
    (tmp_path / "packed").mkdir()
    assert pack_into(deployable, out, tmp_path / "packed", seed=1).float32 == ("trunk.2",)
    case = Case(small_network.NAME, "real", "llvm", precision="bf16")
    with pytest.raises(HarnessError, match=sentence("unknown-group", unknown="scale")):
        spec = ArtifactSpec(deployable, case, Settings(float32=frozenset(["scale"])), deployable.options())
        compile_into(spec, tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "0"), sentence("no-limit", limit=0)),
        (("--limit", "nan"), sentence("no-limit", limit="nan")),
        (("--precision", "fp32"), sentence("no-half-precision", precision="fp32")),
        (("--half-rate", "200"), sentence("no-saving", half=200)),
        (("--component", "box_heat"), sentence("unknown-name", hint="box_head")),
        (("--component", "end_to_end"), sentence("not-a-component", name="end_to_end")),
        (("--out", "nowhere/budget.json"), sentence("cannot-write", path="nowhere/budget.json")),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = tmp_path / "budget.json"
    given = ("budget", "--component", "box_head", "--limit", "0.7", "--out", str(file), *arguments)
    with pytest.raises(HarnessError, match=message):
        app(given, standalone_mode=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--component", "box_head"), sentence("unused-budget", unused="perceptron, not for box_head")),
        (
            ("tune", "--component", "box_head", "--trials", "1"),
            sentence("unused-budget", unused="perceptron, not for box_head"),
        ),
        (
            ("tune", "--precision", "fp16", "--trials", "1"),
            sentence("unsupported-precision", target="llvm", precisions="fp16"),
        ),
        (("explain", "--component", "box_head"), sentence("unused-budget", unused="perceptron, not for box_head")),
        (
            ("compile", "--out", "x", "--precision", "bf16", "--scale", "shallow"),
            sentence("budget-for-model", model="small_network", model2="sam3"),
        ),
    ],
)
def test_a_budget_for_something_else_is_one_sentence(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    budget = Budget(small_network.NAME, "perceptron", "shallow", "llvm", "bf16", 0.7, ("head",))
    (tmp_path / "budget.json").write_text(json.dumps(budget.to_json()))
    with pytest.raises(HarnessError, match=message):
        app((*arguments, "--budget", "budget.json"), standalone_mode=False)
    assert not (tmp_path / "x").exists()


def test_of_several_budgets_each_is_for_its_component(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for component, groups in (("box_head", ("a",)), ("scoring_head", ("b", "c"))):
        budget = Budget("sam3", component, "shallow", "llvm", "bf16", 0.7, groups)
        files.append(tmp_path / f"{component}.json")
        files[-1].write_text(json.dumps(budget.to_json()))
    both = select(("box_head", "scoring_head"), ("real",), ("llvm",), precisions=("bf16",))
    assert chosen_groups(files, both) == {"box_head": {"a"}, "scoring_head": {"b", "c"}}
    assert not capsys.readouterr().out
    assert chosen_groups(files, both[:1]) == {"box_head": {"a"}}
    assert "is a budget for scoring_head, not for box_head." in capsys.readouterr().out
    assert chosen_groups(files, [Case("end_to_end", "real", "llvm", precision="bf16")]) == {"end_to_end": {*"abc"}}
