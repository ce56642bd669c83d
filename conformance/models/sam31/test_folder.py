"""SAM 3.1, compiled: its folder knows the model by the checkpoint, and finds and clicks what PyTorch does."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from conformance.support.folders import CompiledCheckpoint, EncodesOnce, change_manifest
from conformance.support.sentences import sentence
from conformance.support.whole import verified
from harness.app.ui.sessions import make_page
from harness.cli.main import app
from harness.compiler.lowering.groups import always_float32
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.targets import HOST
from harness.core.case import DEFAULT_STRATEGY, TINY, Case
from harness.core.errors import HarnessError
from harness.core.outcome import Status
from harness.core.processes.call import Template
from harness.core.settings import SEEDED, Settings
from harness.models.sam3.build import build_architecture as build_sam3
from harness.models.sam3.checkpoints.names import video_name
from harness.models.sam3.end_to_end import script as end_to_end
from harness.models.sam3.fixtures import read_questions
from harness.models.sam3.groups import note_groups
from harness.models.sam3.interactive import script as interactive
from harness.models.sam3.source import UpstreamModel
from harness.models.sam3.upstream import upstream
from harness.models.sam3.weights import seed_weights
from harness.models.sam31.build import build_architecture
from harness.models.sam31.components import BUILDER
from harness.parity.references import select
from harness.runtime import Sam3
from harness.runtime.artifact import Artifact
from harness.runtime.errors import ModelError
from harness.runtime.manifest import read_any_manifest
from harness.runtime.sam3.images import load_image
from harness.runtime.sam3.video.multiplex import MultiplexTracker

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def folder(sam31_artifact: CompiledCheckpoint) -> Path:
    return sam31_artifact.folder


@pytest.fixture
def checkpoint(sam31_artifact: CompiledCheckpoint) -> Path:
    return sam31_artifact.checkpoint


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy", copy_function=os.link))


def test_the_checkpoint_says_which_model_it_is(sam31_artifact: CompiledCheckpoint) -> None:
    assert "sam3.1_multiplex.pt: SAM 3.1 under upstream's names" in sam31_artifact.printed


def test_the_manifest_says_which_model_it_is(folder: Path) -> None:
    manifest = read_any_manifest(folder)
    assert (manifest.model, manifest.trained) == ("sam3.1", True)
    assert Sam3.load(folder).description.capacity.clicks == 16


@pytest.fixture(scope="module")
def compiled(sam31_artifact: CompiledCheckpoint) -> Sam3:
    return Sam3(EncodesOnce.load(sam31_artifact.folder, check=False))


@cache
def pytorch_for(_script: ModuleType) -> UpstreamModel:
    """Returns the model that encodes a photograph once for the questions of a script."""
    return UpstreamModel(Case("", DEFAULT_STRATEGY, HOST.name, TINY), SEEDED, BUILDER)


@pytest.mark.parametrize(
    ("script", "question", "judge"),
    [
        pytest.param(end_to_end, "text_and_box", end_to_end.judge_answer, id="text and box"),
        pytest.param(interactive, "refined", interactive.judge_round, id="clicks"),
        pytest.param(interactive, "clicks", interactive.judge_round, id="one mask"),
    ],
)
def test_it_answers_as_pytorch(script: ModuleType, question: str, judge: Any, compiled: Sam3) -> None:
    asked = next(one for one in read_questions(script.QUESTIONS, script.Question) if one.name == question)
    asked = msgspec.structs.replace(asked, float64=False)
    with upstream():
        pytorch = pytorch_for(script)
        expected = pytorch.answer(script.UPSTREAM, asked)
        actual = script.ask_compiled(compiled.set_image(asked.image), asked, pytorch)
        size = load_image(asked.image).size
        verdicts = [
            verdict
            for name in asked.answers
            for verdict in judge(name, select(actual, name), expected.part(name), size)
        ]
    assert verdicts
    assert [verdict for verdict in verdicts if not verdict.kind.passes] == []


QUESTIONS = {"sam31_end_to_end": "tall", "sam31_interactive": "click", "sam31_video": "corrections"}
"""By whole model, a question that is answered with each strategy."""


@pytest.mark.wide
@pytest.mark.parametrize("component", QUESTIONS)
def test_the_shallow_model_is_strict(
    component: str, verification_settings: Settings, verifying_process: Template, request: pytest.FixtureRequest
) -> None:
    case = Case(component, DEFAULT_STRATEGY, HOST.name)
    outcome = verified(case, verification_settings, (), verifying_process, request).outcome
    assert outcome.status is Status.PASSED
    if component == "sam31_video":
        assert {verdict.name.split("/")[1] for verdict in outcome.verdicts} == {*MultiplexTracker.entries}


@pytest.mark.wide
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != DEFAULT_STRATEGY])
@pytest.mark.parametrize("component", QUESTIONS)
def test_each_strategy_is_strict_or_the_control(
    component: str,
    strategy: str,
    verification_settings: Settings,
    verifying_process: Template,
    request: pytest.FixtureRequest,
) -> None:
    case = Case(component, strategy, HOST.name)
    result = verified(case, verification_settings, (QUESTIONS[component],), verifying_process, request)
    assert result.outcome.status is (Status.FAILED if strategy == "none" else Status.PASSED)


@pytest.mark.wide
@pytest.mark.parametrize("component", ["sam31_end_to_end", "sam31_interactive"])
def test_half_precision_is_as_accurate_as_autocast(
    component: str, verification_settings: Settings, verifying_process: Template, request: pytest.FixtureRequest
) -> None:
    case = Case(component, DEFAULT_STRATEGY, HOST.name, precision="bf16")
    assert verified(case, verification_settings, (), verifying_process, request).outcome.status is Status.PASSED


def test_what_stays_float32_is_named_as_the_model_names_it() -> None:
    model = build_architecture(TINY)
    assert [path for path in model.float32_paths if path not in dict(model.named_modules())] == []
    note_groups(model)
    assert always_float32(model) == {*model.float32_paths}


def test_the_page_offers_clicks_and_kinds(folder: Path, tmp_path: Path) -> None:
    page = make_page(Sam3.load(folder, check=False), "sam31", None, tmp_path, None, 1)
    assert (page.abilities["clicks"], page.abilities["boxes"]) == (16, 48)


def test_a_folder_that_was_compiled_without_tracking_says_so(folder: Path) -> None:
    artifact = Artifact.load(folder, check=False)
    entries = {name: entry for name, entry in artifact.manifest.entries.items() if name != "encode_memory"}
    artifact.manifest = msgspec.structs.replace(artifact.manifest, entries=entries)
    with pytest.raises(ModelError, match=sentence("no-tracking", missing="encode_memory")):
        Sam3(artifact).start_session([])


def test_weights_of_the_other_model_are_refused(copy: Path, checkpoint: Path, tmp_path: Path) -> None:
    state = build_sam3(TINY, interactive=True).state_dict()
    earlier = tmp_path / "sam3.pt"
    torch.save({video_name(name): torch.zeros_like(tensor) for name, tensor in state.items()}, earlier)
    arguments = ["verify", "--model", str(copy), "--scale", "shallow", "--checkpoint", str(earlier)]
    with pytest.raises(HarnessError, match=sentence("not-sam31", path="sam3.pt")):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    with pytest.raises(HarnessError, match=sentence("not-sam31", path="sam3.pt")):
        pack(copy, earlier)
    change_manifest(copy, model="sam3")
    with pytest.raises(HarnessError, match=sentence("sam31-checkpoint", path="sam3.1_multiplex.pt")):
        pack(copy, checkpoint)


def pack(folder: Path, weights: Path) -> None:
    CliRunner().invoke(app, ["pack", "--into", str(folder), "--checkpoint", str(weights)], catch_exceptions=False)


def test_other_weights_of_it_are_packed(copy: Path, tmp_path: Path) -> None:
    model = build_architecture(TINY)
    seed_weights(model, 1)
    torch.save(model.state_dict(), tmp_path / "trained.pt")
    pack(copy, tmp_path / "trained.pt")
    manifest = read_any_manifest(copy)
    assert (manifest.model, manifest.weights.partition(",")[0]) == ("sam3.1", "trained.pt")


def test_a_folder_is_judged_as_its_model(folder: Path) -> None:
    arguments = ["verify", "--model", str(folder), "--scale", "shallow", "--component", "interactive"]
    with pytest.raises(HarnessError, match=r"a folder of sam3\.1, and interactive is a subject of sam3: leave out"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
