"""The command as a user meets it: real processes, exit codes, one sentence for every mistake, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import save_file

from conformance.support.commands import run_command
from conformance.support.sentences import sentence
from conformance.support.shallow import build_model
from harness.compiler.targets.system_cpu import FILE
from harness.core.case import Case
from harness.core.outcome import CaseError, Outcome, Stage, Status, Verdict, VerdictKind
from harness.core.settings import REPOSITORY, Settings
from harness.models.sam3.components import COMPONENTS
from harness.verify.report import Result, read_report
from harness.verify.runner import exit_code, repro_flags

QUICK = ("--component", "box_head")
TWO_AT_A_TIME = (*QUICK, "--component", "scoring_head", "--jobs", "2")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "harness", *arguments]


def sam3_tvm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, environment={**os.environ, "COLUMNS": "200", **environment})


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for word in words:
        assert re.search(word, done.stderr), done.stderr


@dataclass(frozen=True)
class Verified:
    """A run of two cases at a time: the folder of its report, and what it printed."""

    report: Path
    printed: str


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    """Its outputs are the last that were saved when the first test asks for it."""
    report = tmp_path_factory.mktemp("verified") / "report"
    done = sam3_tvm("verify", *TWO_AT_A_TIME, "--report", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    return Verified(report, done.stdout)


def test_saved_outputs_can_be_judged_again(verified: Verified, tmp_path: Path) -> None:
    again = sam3_tvm("verify", *QUICK, "--judge-saved", "--report", str(tmp_path))
    assert again.returncode == 0, again.stdout + again.stderr
    reports = (verified.report, tmp_path)
    cases = [read_report(folder / "verification_report.json")["cases"][0] for folder in reports]
    assert cases[0]["outputs"] == cases[1]["outputs"]
    assert "compile" in cases[0]["seconds"]
    assert "compile" not in cases[1]["seconds"]


def test_verify_writes_a_report_and_exits_0(verified: Verified) -> None:
    report = read_report(verified.report / "verification_report.json")
    assert report["summary"]["passed"] == 2
    assert [output["verdict"] for output in report["cases"][0]["outputs"]] == ["strict", "strict"]
    page = (verified.report / "VERIFICATION_REPORT.md").read_text(encoding="utf-8")
    assert "box_head" in page
    assert sorted(path.name for path in verified.report.iterdir()) == [
        "VERIFICATION_REPORT.md",
        "verification_report.html",
        "verification_report.json",
    ]


def test_cases_that_run_at_a_time_are_reported_in_order(verified: Verified) -> None:
    cases = read_report(verified.report / "verification_report.json")["cases"]
    assert [case["component"] for case in cases] == ["box_head", "scoring_head"]
    assert [case["status"] for case in cases] == ["passed", "passed"]
    assert all(f"✓ {component}-real-llvm-shallow" in verified.printed for component in ("scoring_head", "box_head"))


def test_verify_with_a_checkpoint(tmp_path: Path) -> None:
    other_weights = build_model("shallow", seed=1).state_dict()
    path = tmp_path / "sam3.safetensors"
    save_file({f"detector.{name}": value for name, value in other_weights.items() if not value.is_complex()}, path)
    done = sam3_tvm("verify", *QUICK, "--checkpoint", str(path), "--report", str(tmp_path / "report"))
    assert done.returncode == 0, done.stdout + done.stderr
    case = read_report(tmp_path / "report" / "verification_report.json")["cases"][0]
    assert [output["verdict"] for output in case["outputs"]] == ["strict", "strict"]
    assert case["repro"].endswith(f"--checkpoint {path}")


@pytest.mark.wide
def test_verify_with_outliers(tmp_path: Path) -> None:
    done = sam3_tvm("verify", *QUICK, "--weights", "outliers", "--report", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "box_head-real-llvm-shallow-outliers" in done.stdout
    (case,) = read_report(tmp_path / "verification_report.json")["cases"]
    assert (case["weights"], case["status"]) == ("outliers", "passed")
    assert "--weights outliers" in case["repro"]


STRICT = Verdict("boxes", (1,), "float32", 1, 0, 0.0, 0.0, 0.0, 0.0, 99.0, 1.0, 1.0, VerdictKind.STRICT)
OUTCOMES = {
    "compiled": Outcome(Stage.COMPILE, Status.UNAVAILABLE, CaseError("CannotRun", "there is no device")),
    "not compiled": Outcome(Stage.BUILD, Status.UNAVAILABLE, CaseError("CannotCompile", "there is no compiler")),
    "emulated": Outcome(Stage.JUDGE, Status.PASSED, verdicts=(STRICT,), emulated=True),
    "passed": Outcome(Stage.JUDGE, Status.PASSED, verdicts=(STRICT,)),
    "failed": Outcome(Stage.COMPILE, Status.FAILED, CaseError("RuntimeError", "no kernel")),
}


@pytest.mark.law
@pytest.mark.parametrize("target", ["cuda", "metal"])
@pytest.mark.parametrize(
    ("names", "code", "required"),
    [
        (["compiled"], 0, 1),
        (["compiled", "emulated"], 0, 1),
        (["emulated"], 0, 1),
        (["passed"], 0, 0),
        (["passed", "compiled"], 0, 1),
        (["compiled", "not compiled"], 0, 1),
        (["not compiled"], 1, 1),
        (["compiled", "failed"], 1, 1),
        (["passed", "failed"], 1, 1),
        ([], 1, 1),
    ],
)
def test_the_exit_code_is_the_same_for_every_target(names: list[str], code: int, required: int, target: str) -> None:
    results = [Result.from_outcome(Case("box_head", "real", target), OUTCOMES[name], None) for name in names]
    assert exit_code(results) == code
    assert exit_code(results, [target]) == required
    assert exit_code(results, ["llvm"]) == code


@pytest.mark.law
def test_what_was_emulated_is_reproduced_by_emulation() -> None:
    assert "--emulate" in repro_flags(Settings(emulate=True))
    assert "--emulate" not in repro_flags(Settings())


@pytest.mark.law
def test_what_is_reproduced_is_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside, outside = Settings(database=tmp_path / "fixtures" / "tuned"), Settings(database=tmp_path.parent / "tuned")
    assert repro_flags(inside) == ("--db", str(Path("fixtures", "tuned")))
    assert repro_flags(outside) == ("--db", str(tmp_path.parent / "tuned"))


def test_list_names_every_component() -> None:
    done = sam3_tvm("list")
    assert done.returncode == 0
    for name in COMPONENTS:
        assert name in done.stdout


def test_import_is_fast_and_light() -> None:
    code = (
        "import sys, harness.cli.main, harness.models.sam3.components\n"
        "import harness.compiler.lowering.rope, harness.compiler.targets\n"
        "print([name for name in ('torch', 'tvm', 'sam3', 'torchvision', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--component", "vision_backbon"), (sentence("unknown-name", name="vision_backbon", hint="vision_backbone"),)),
        (("--target", "lvm"), (sentence("unknown-name", name="lvm", hint="llvm"),)),
        (("--strategy", "reel"), (sentence("unknown-name", name="reel", hint="real"),)),
        (("--scale", "fulll"), (sentence("unknown-name", name="fulll", hint="full"),)),
        (("--weights", "outlier"), (sentence("unknown-name", name="outlier", hint="outliers"),)),
        ((*QUICK, "--strategy", "none"), (sentence("no-strategy", components="box_head", applying="real"),)),
        (("--seed", "x"), ("--seed",)),
        (("--seed", "-1"), ("--seed",)),
        (("--timeout", "0"), ("--timeout",)),
        (("--frobnicate", "1"), ("--frobnicate",)),
        ((*QUICK, "--require-target", "cuda"), (sentence("target-not-asked", name="cuda"),)),
        ((*QUICK, "--report", "text"), ("text", "--report")),
        ((*QUICK, "--image", "text"), ("text",)),
        ((*QUICK, "--checkpoint", "none.pt"), ("none.pt",)),
        ((*QUICK, "--checkpoint", "text"), (sentence("not-a-checkpoint", path="text"),)),
        ((*QUICK, "--weights", "outliers", "--checkpoint", "zip"), (sentence("checkpoint-has-weights"),)),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"text": b"mine", "zip": b"PK\x03\x04"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    done = sam3_tvm("verify", "--report", "report", *arguments, PYTHONPATH=str(REPOSITORY))
    assert_one_sentence(done, *words)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "report"} == files
    assert not (tmp_path / "report").exists() or not list((tmp_path / "report").iterdir())


# One case every night: that a worker refuses its input is told of one case in `test_cache_that_cannot_be_written`, too.
@pytest.mark.parametrize("cases", [pytest.param(QUICK, marks=pytest.mark.wide), TWO_AT_A_TIME], ids=["one", "two"])
def test_checkpoint_that_is_cut_off(tmp_path: Path, cases: tuple[str, ...]) -> None:
    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04 and then nothing")
    done = sam3_tvm(
        "verify", *cases, "--checkpoint", str(tmp_path / "weights.pt"), "--report", str(tmp_path / "report")
    )
    assert_one_sentence(done, sentence("truncated", path="weights.pt"))
    assert list((tmp_path / "report").iterdir()) == []


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    done = sam3_tvm("verify", *QUICK, "--report", str(tmp_path / "report"), SAM3_TVM_CACHE=str(tmp_path / "taken"))
    assert_one_sentence(done, "SAM3_TVM_CACHE")


def test_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    # A limit on file size fails a write in the middle, as a full disk does, for every process of the run.
    arguments, variables = ("verify", *QUICK, "--report", str(tmp_path / "report")), {"COLUMNS": "200"}
    variables |= {**os.environ, "SAM3_TVM_CACHE": str(tmp_path / "cache")}
    done = run_command(*arguments, environment=variables, largest_file=64 << 10)
    assert_one_sentence(done, "cannot write", "free some space")
    kept = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert kept <= {FILE}, "what was written before is whole"


def test_time_limit_is_an_outcome(tmp_path: Path) -> None:
    slow = ("--component", "text_encoder", "--strategy", "real")
    done = sam3_tvm("verify", *slow, "--timeout", "1", "--report", str(tmp_path))
    assert done.returncode == 1
    case = json.loads((tmp_path / "verification_report.json").read_text(encoding="utf-8"))["cases"][0]
    assert (case["status"], case["expected"]) == ("timed_out", False)
    assert case["repro"].startswith("sam3-tvm verify --component text_encoder")


@pytest.mark.parametrize(
    ("cases", "how"),
    # By day both numbers of cases and two signals; every night the other pairs.
    [
        (QUICK, signal.SIGINT),
        pytest.param(TWO_AT_A_TIME, signal.SIGINT, marks=pytest.mark.wide),
        pytest.param(QUICK, signal.SIGTERM, marks=pytest.mark.wide),
        (TWO_AT_A_TIME, signal.SIGHUP),
    ],
    ids=["one", "two", "terminated", "hung up"],
)
def test_what_is_interrupted_ends_at_once_and_leaves_nothing_half_written(
    tmp_path: Path, cases: tuple[str, ...], how: signal.Signals
) -> None:
    process = subprocess.Popen(
        command("verify", *cases, "--report", str(tmp_path / "report")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1)
    process.send_signal(how)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + how
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["report"], "the worker's folder must be gone"
    assert list((tmp_path / "report").iterdir()) == []
