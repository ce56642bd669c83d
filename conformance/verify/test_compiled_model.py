"""`verify --model`: the folder that ships is judged as it is, and refused where it is not what would be judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.support.commands import run_command
from conformance.support.folders import change_manifest, rewrite
from harness.compiler.deployment.packing import pack_model
from harness.core.case import Case
from harness.core.processes.call import Template
from harness.core.settings import Settings
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.verify.report import read_report
from harness.verify.runner import verify_case

pytestmark = pytest.mark.model


@pytest.fixture
def verify(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs the command; returns its exit code, and what it printed to stderr on one line."""

    def run(*arguments: str) -> tuple[int, str]:
        done = run_command("verify", "--report", str(tmp_path / "report"), *arguments)
        return done.returncode, " ".join(done.stderr.split())

    return run


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "another precision": (("--precision", "bf16"), "compiled with precision fp32, not bf16: leave out --precision"),
    "another seed": (("--seed", "7"), "weights of seed 0, and would be judged by those of seed 7"),
    "a component": (("--component", "vit"), "vit is a component: leave one of them out"),
    "schedules": (("--untuned",), "--untuned needs a compilation: leave one of them out"),
    "other outputs": (("--judge-saved",), "--judge-saved runs none: leave one of them out"),
    "a question to two models": (("--question", "text"), "--question needs one whole model"),
    "no question": (("--component", "end_to_end", "--question", "txt"), "Unknown question 'txt': did you mean 'text'"),
    "a diagnosis": (("--diagnose",), "--diagnose needs a compilation: leave one of them out"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_the_folder_is_not_is_refused(
    arguments: tuple[str, ...], sentence: str, shallow_artifact: Path, verify: Callable[..., tuple[int, str]]
) -> None:
    code, printed = verify("--model", str(shallow_artifact), *arguments)
    assert code == 2
    assert sentence in printed
    assert printed.startswith("error: ") and printed.count("error: ") == 1


def test_a_folder_that_answers_nothing_is_refused(copy: Path, verify: Callable[..., tuple[int, str]]) -> None:
    change_manifest(copy, capacity={"points": 1, "boxes": 1, "clicks": 0, "video": False})
    code, printed = verify("--model", str(copy))
    assert (code, "The folder can answer no question" in printed) == (2, True), printed
    code, printed = verify("--model", str(copy), "--component", "interactive")
    assert (code, "interactive needs a model of Capacity(" in printed) == (2, True), printed
    change_manifest(copy, model="another")
    code, printed = verify("--model", str(copy))
    assert (code, "it has the model another" in printed) == (2, True), printed


@pytest.mark.parametrize("damage", ["a flipped bit", "no library", "no folder", "a checkpoint's"])
def test_a_damaged_folder_is_one_sentence(damage: str, copy: Path, verify: Callable[..., tuple[int, str]]) -> None:
    weights = copy / "ground.safetensors"
    if damage == "a flipped bit":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        rewrite(weights, bytes(content))
    elif damage == "no library":
        (copy / "model.so").unlink()
    elif damage == "a checkpoint's":
        change_manifest(copy, weights="sam3.pt, SHA-256 " + 64 * "0", trained=True)
    folder = copy / "none" if damage == "no folder" else copy
    code, printed = verify("--model", str(folder), "--component", "interactive")
    named = {
        "a flipped bit": "ground.safetensors",
        "no library": "model.so",
        "no folder": "none",
        "a checkpoint's": "--checkpoint",
    }
    assert code == 2 and named[damage] in printed, printed
    assert "Traceback" not in printed


@pytest.mark.wide
def test_a_folder_with_other_weights_than_it_says_fails(
    copy: Path, verifying_process: Template, verify: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    pack_model(DEPLOYABLE, copy, seed=1)
    case = Case("interactive", "real", "llvm", seed=1)
    assert verify_case(case, Settings(model=copy), template=verifying_process).expected
    assert verify("--model", str(copy), "--component", "interactive")[0] == 0
    (judged,) = read_report(tmp_path / "report" / "verification_report.json")["cases"]
    assert (judged["component"], judged["seed"], judged["status"]) == ("interactive", 1, "passed")
    change_manifest(copy, weights="seed 0")
    assert verify("--model", str(copy), "--component", "interactive")[0] == 1
