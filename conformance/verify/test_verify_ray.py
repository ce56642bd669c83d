"""`sam3-tvm verify --ray`: cases on nodes that have what they need, with the outcomes of a process on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.cli.test_interrupted import MODELS
from conformance.support.recurrent_segmenter import CLIP
from conformance.support.sentences import sentence
from conformance.support.small_network import PERCEPTRON
from harness.core import cluster
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.processes.call import Stopped, WorkerEnd
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.settings import SEEDED
from harness.models.registry import MODELS_VARIABLE
from harness.models.selection import select
from harness.verify.cluster import check_nodes, resources_of_case, resources_of_machine, run_on_node

ROOT = Path(__file__).resolve().parents[2]


def case_of(target: str) -> Case:
    (case,) = select(("box_head",), ("real",), (target,), ("shallow",), 0, ("fp32",), ("torch",), ("seeded",))
    return case


@pytest.mark.parametrize(
    ("target", "processors", "resources"),
    [
        ("llvm", THIS_MACHINE, set()),
        ("llvm", Processors(cpu="x86-64-v3"), set()),
        ("llvm", Processors(cpu="x86-64-v4"), {"avx512"}),
        ("llvm", Processors(cpu="sapphirerapids+amx"), {"amx", "avx512"}),
        ("llvm", Processors(cpu="neoverse-n1"), {"arm64"}),
        ("cuda", THIS_MACHINE, {"GPU"}),
    ],
)
def test_what_a_node_must_have(target: str, processors: Processors, resources: set[str]) -> None:
    assert resources_of_case(case_of(target), processors).keys() == resources


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    components = [
        "--component",
        CLIP.name,
        "--component",
        PERCEPTRON.name,
        "--strategy",
        "lowering",
        "--strategy",
        "real",
    ]
    command = [sys.executable, "-m", "harness", "verify", *components, *arguments]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT), MODELS_VARIABLE: MODELS}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--ray", "--diagnose"), sentence("ray-alone", flag="--diagnose")),
        (("--ray-address", "localhost:1"), sentence("address-without-ray")),
    ],
)
def test_options_that_contradict_each_other(arguments: tuple[str, ...], expected: str) -> None:
    finished = verify(*arguments)
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1)
    assert re.search(expected, finished.stderr)


def test_no_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    finished = verify("--ray", "--ray-address", "127.0.0.1:9", "--report", str(tmp_path))
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1), finished.stderr
    assert re.search(sentence("no-ray-cluster", place="127.0.0.1:9"), finished.stderr)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray on this machine."""
    module = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch, cluster.connect(None, resources_of_machine()):
        patch.setenv("PYTHONPATH", str(ROOT))
        yield module


def run(function: str, **limits: Any) -> Any:
    arguments, stages = (case_of("llvm"), SEEDED), list[str]()
    result = run_on_node(f"conformance.support.misbehaviour:{function}", *arguments, on_stage=stages.append, **limits)
    assert stages == [crumb.stage for crumb in result.breadcrumbs]
    return result


def test_outcomes_are_those_of_a_process_on_this_machine(ray: Any) -> None:
    assert check_nodes() == 1
    result = run("echo", timeout=60)
    assert (result.kind, result.value, result.stage) == (WorkerEnd.OK, case_of("llvm"), "second")
    result = run("read_through_a_null_pointer", timeout=60)
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.CRASHED, "SIGSEGV", "before the crash")
    result = run("hang_in_python", timeout=2)
    assert (result.kind, result.error.type) == (WorkerEnd.TIMED_OUT, "TimeLimit")
    result = run("hang_in_python", timeout=60, memory_limit_bytes=2**20)
    assert (result.kind, result.error.type) == (WorkerEnd.OUT_OF_MEMORY, "MemoryLimit")


def test_a_node_of_another_version(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.verify.cluster.__version__", "0.0")
    with pytest.raises(HarnessError, match=sentence("node-of-other-version", expected="0.0")):
        check_nodes()
    with pytest.raises(HarnessError, match=sentence("no-node-for-case")):
        check_nodes(2**60)


def test_a_case_that_no_node_has_room_for(ray: Any) -> None:
    """Ray would wait for a node that has."""
    with pytest.raises(HarnessError, match=sentence("no-node-for-case")):
        run("echo", memory_limit_bytes=2**60)


def test_a_case_that_is_stopped(ray: Any) -> None:
    stop = threading.Event()
    threading.Timer(1, stop.set).start()
    with pytest.raises(Stopped):
        run("hang_in_python", stop=stop)


def test_the_report_is_that_of_this_machine(tmp_path: Path) -> None:
    """Three cases, one of which fails, run on a cluster that is started for the command."""
    pytest.importorskip("ray")
    cases = []
    for name, arguments in {"ray": ("--ray",), "alone": ()}.items():
        report = tmp_path / name
        finished = verify("--threads", "1", "--report", str(report), *arguments)
        assert finished.returncode == 1, finished.stdout + finished.stderr
        (path,) = report.glob("*.json")
        data = json.loads(path.read_text(encoding="utf-8"))
        assert ("runs on" in data["machine"]) == (name == "ray")
        fields = ("component", "status", "stage", "expected", "outputs")
        cases.append([{field: case[field] for field in fields} for case in data["cases"]])
    assert cases[0] == cases[1]
    assert [case["status"] for case in cases[0]] == ["failed", "passed", "passed"]
    assert [case["component"] for case in cases[0]] == [CLIP.name, CLIP.name, PERCEPTRON.name]
