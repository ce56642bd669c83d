"""A model with state from outside the package: verified, reported, compiled, and run without PyTorch."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.support import projection, recurrent_segmenter, small_segmenter
from conformance.support.commands import run_command
from conformance.support.recurrent_segmenter import CHANNELS, FRAMES, TOKENS
from conformance.support.recurrent_step import Step
from conformance.support.sentences import sentence
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import REPOSITORY, SEEDED
from harness.models.registry import MODELS_VARIABLE, models, subjects
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact
from harness.runtime.manifest import ArtifactError


@pytest.fixture
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, f"{recurrent_segmenter.__name__},{projection.__name__}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, folder=folder)


def test_it_is_verified_with_strategies_and_its_own_expectation(plugged_in: None, tmp_path: Path) -> None:
    strategies = [word for name in ("none", "lowering", "converter") for word in ("--strategy", name)]
    done = command("verify", "--component", "clip", *strategies, "--report", "report", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report" / "verification_report.json").read_text())
    ended = {case["strategy"]: (case["status"], case["stage"], case["expected"]) for case in report["cases"]}
    passed = ("passed", "judge", True)
    assert ended == {"none": ("failed", "import", True), "lowering": passed, "converter": passed}
    for case in report["cases"]:
        names = [output["name"] for output in case["outputs"]]
        judged = [f"frame_{number}/{name}" for number in range(FRAMES) for name in ("logits", "memory")]
        assert names == (judged if case["status"] == "passed" else [])
        assert {output["verdict"] for output in case["outputs"]} <= {"strict"}
    assert "clip" in (tmp_path / "report" / "VERIFICATION_REPORT.md").read_text()


@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("bf16", 2.0**-5)])
def test_it_is_compiled_and_runs_with_its_state(plugged_in: None, tmp_path: Path, precision: str, error: float) -> None:
    chosen = ("--model", "recurrent", "--strategy", "lowering", "--scale", "shallow", "--precision", precision)
    done = command("compile", *chosen, "--out", "model", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("files.")
    hold_to_pytorch(tmp_path / "model", 0, error)
    done = command("pack", "--seed", "1", "--into", "model", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    hold_to_pytorch(tmp_path / "model", 1, error)
    with pytest.raises(ArtifactError, match=sentence("other-model", folder="model", model="recurrent", name="sam3")):
        Sam3.load(tmp_path / "model")


def hold_to_pytorch(folder: Path, seed: int, error: float) -> None:
    """Runs the folder's model on frames of a clip and compares logits and state with PyTorch's."""
    artifact = Artifact.load(folder)
    assert (artifact.manifest.model, artifact.manifest.extra) == ("recurrent", {})
    rng = np.random.default_rng(0)
    step = Step(seed).eval()
    memory = wanted = rng.standard_normal((TOKENS, CHANNELS), np.float32)
    for _ in range(FRAMES):
        frame = rng.standard_normal((TOKENS, CHANNELS), np.float32)
        results = artifact.call("step", frame=frame, memory=memory)
        memory = artifact.fetch(results["memory"])
        with torch.no_grad():
            logits, after = step(torch.from_numpy(frame), torch.from_numpy(wanted))
        wanted = after.numpy()
        np.testing.assert_allclose(artifact.fetch(results["logits"]), logits.numpy(), rtol=error, atol=error)
        np.testing.assert_allclose(memory, wanted, rtol=error, atol=error)


def test_it_brings_its_own_options_and_no_others(plugged_in: None, tmp_path: Path) -> None:
    chosen = ("compile", "--model", projection.NAME, "--out", "model")
    for wrong, words in ((("--clicks", "3"), "No such option: --clicks"), (("--width", "0"), "--width")):
        refused = command(*chosen, *wrong, folder=tmp_path)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    assert "--width" in command(*chosen, "--help", folder=tmp_path).stdout
    done = command(*chosen, "--width", "6", folder=tmp_path)
    assert (done.returncode, "; 6 outputs." in done.stdout) == (0, True), done.stdout + done.stderr
    x = np.random.default_rng(0).standard_normal((projection.ROWS, projection.INPUTS), np.float32)
    for seed in (0, 1):
        artifact = Artifact.load(tmp_path / "model")
        assert artifact.manifest.extra == {"width": 6}
        expected = projection.layer(seed, 6)(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(
            artifact.fetch(artifact.call("project", input=x)["y"]), expected, rtol=1e-5, atol=1e-5
        )
        packed = command("pack", "--seed", "1", "--into", "model", folder=tmp_path)
        assert (packed.returncode, "; 6 outputs." in packed.stdout) == (0, True), packed.stdout + packed.stderr


def test_state_is_what_makes_later_frames_differ() -> None:
    """The judge would not see a state that nothing reads."""
    workload = recurrent_segmenter.open_clip(Case("clip", "lowering", "llvm"), SEEDED)
    reference = workload.reference()
    first, again = reference.first, reference.again
    assert first.keys() == again.keys() and all(np.array_equal(first[name], again[name]) for name in first)
    with torch.no_grad():
        forgotten = workload.programs["step"].module(workload.trace[1].arguments[0], workload.trace[0].arguments[1])
    assert np.abs(first["frame_1/logits"] - forgotten[0].numpy()).max() > 1e-3


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("no_such_module", sentence("no-model", module="no_such_module")),
        ("json", sentence("no-model", module="json")),
        ("harness.models.sam3.model", sentence("models-of-one-name", name="sam3")),
    ],
)
def test_what_is_no_model_is_a_sentence(monkeypatch: pytest.MonkeyPatch, module: str, expected: str) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, module)
    models.cache_clear()
    subjects.cache_clear()
    try:
        with pytest.raises(HarnessError, match=expected):
            models()
    finally:
        models.cache_clear()
        subjects.cache_clear()


def test_a_model_without_entry_points_is_not_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, small_segmenter.__name__)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    done = command("compile", "--model", small_segmenter.NAME, "--out", "model", folder=tmp_path)
    assert done.returncode == 2
    assert re.search(sentence("nothing-to-deploy", model=small_segmenter.NAME), done.stderr), done.stderr
    assert not (tmp_path / "model").exists()
