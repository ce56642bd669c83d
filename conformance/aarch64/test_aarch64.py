"""What runs as AArch64 code, emulated where this machine is none: which processor it is, components, `segment`.

`make test-arm` runs these, and the tests of the CPU kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO

from conformance.aarch64.environment import CPU, Machine, environment, machine, machine_for
from conformance.support.remotes import device
from harness.compiler.execution.remote.client import describe_remote
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.outcome import Status, VerdictKind
from harness.core.processes.call import Template
from harness.core.processors import Processors
from harness.core.settings import Settings
from harness.runtime.cpu import cpu_features
from harness.verify.runner import verify_case

CAT = Path(__file__).resolve().parents[2] / "fixtures" / "images" / "cat.png"


@pytest.fixture(scope="module", autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("aarch64"):
        pytest.skip("an emulated machine takes minutes: make test-arm")


@pytest.fixture(scope="module")
def here(request: pytest.FixtureRequest) -> Machine:
    return machine_for(request.config.getoption("cpu"))


def compiled(folder: Path, processors: Processors) -> Path:
    """The shallow model with seed 0 for these processors."""
    command = [
        sys.executable,
        "-m",
        "harness",
        "compile",
        "--scale",
        "shallow",
        "--out",
        str(folder),
        *processors.flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


WITH_BF16 = "neoverse-v1"
"""A processor with FEAT_BF16."""
PIXELS = 1e-6
"""The part of all pixels of all masks that two CPUs may decide otherwise; as between PyTorch and compiled code."""


@dataclass(frozen=True)
class Object:
    """An object that `segment` found: its score, and its pixels."""

    score: float
    mask: np.ndarray


def segmented(python: Path, model: Path, out: Path) -> list[Object]:
    """All objects that the command finds with this Python."""
    command = [str(python), "-m", "harness", "segment", str(CAT), "--text", "a cat", "--threshold", "0"]
    command += ["--model", str(model), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = COCO(str(out / "annotations.json"))
    return [Object(one["score"], found.annToMask(one)) for one in found.loadAnns(found.getAnnIds())]


@pytest.fixture(scope="module")
def settings(here: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Cases are compiled and judged on this machine, and run by `serve-device` on the other one."""
    with device(tmp_path_factory.mktemp("device") / "store", python=here.python) as served:
        yield Settings(remote=served.remote, processors=describe_remote(served.remote).processors)


@pytest.fixture(scope="module")
def settings_of_bf16(here: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The same for a processor with instructions for bfloat16."""
    there = machine_for(WITH_BF16)
    if not there.emulated and "bf16" not in (cpu_features() or ()):
        pytest.skip("this processor has no instruction for bfloat16")
    with device(tmp_path_factory.mktemp("device") / "store", python=there.python) as served:
        yield Settings(remote=served.remote, processors=Processors(WITH_BF16))


TELL = """
import json
from harness.runtime.cpu import architecture, cpu_features, cpu_model
from harness.compiler.targets.llvm import cpu_name
print(json.dumps([architecture(), cpu_model(), sorted(cpu_features()), cpu_name()]))
"""


def test_the_processor_is_known_by_its_name_and_its_instructions(here: Machine) -> None:
    told, model, features, cpu = json.loads(here.run("-c", TELL).stdout)
    assert told == "aarch64" and {"neon", "fp-armv8"} <= set(features)
    if not here.emulated:
        return
    assert (model, cpu) == ("Arm Neoverse-N1", CPU)
    assert {"dotprod", "lse", "fullfp16"} <= set(features) and not {"sve", "i8mm", "bf16"} & set(features)
    _, _, features, _ = json.loads(machine("max").run("-c", TELL).stdout)
    assert {"neon", "sve", "sve2", "i8mm", "bf16"} <= set(features)


components = pytest.mark.parametrize(
    "component", ["box_head", "scoring_head", "object_pointers", "prompt_encoder", "mask_decoder"]
)


@components
def test_component(component: str, settings: Settings, verifying_process: Template) -> None:
    case = Case(component, DEFAULT_STRATEGY, "llvm", Scale.SHALLOW)
    outcome = verify_case(case, settings, template=verifying_process).outcome
    assert outcome.status is Status.PASSED, outcome.error
    assert {verdict.kind for verdict in outcome.verdicts} == {VerdictKind.STRICT}, outcome.verdicts
    assert outcome.device is not None and outcome.device.architecture == "aarch64"


@components
def test_component_in_bf16(component: str, settings_of_bf16: Settings, verifying_process: Template) -> None:
    case = Case(component, DEFAULT_STRATEGY, "llvm", Scale.SHALLOW, precision="bf16")
    outcome = verify_case(case, settings_of_bf16, template=verifying_process).outcome
    assert outcome.status is Status.PASSED, outcome.error
    kinds = {verdict.kind for verdict in outcome.verdicts}
    # Masks, and what is only moved, are equal.
    assert VerdictKind.ORACLE in kinds and kinds <= {VerdictKind.ORACLE, VerdictKind.STRICT}, outcome.verdicts
    assert outcome.device is not None and outcome.device.architecture == "aarch64"


def test_segment_on_a_folder_that_was_compiled_for_it(
    here: Machine, settings: Settings, shallow_artifact: Path, tmp_path: Path
) -> None:
    """The objects that this machine finds, from the same command, with the same weights."""
    folder = compiled(tmp_path / "model", settings.processors)
    found = segmented(here.python, folder, tmp_path / "there")
    expected = segmented(Path(sys.executable), shallow_artifact, tmp_path / "here")
    assert len(found) == len(expected) > 0
    differing = 0
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.score, other.score, rtol=1e-5, atol=1e-5)
        differing += np.count_nonzero(one.mask != other.mask)
    # A pixel whose logit is within rounding of the threshold may lie on either side of it.
    assert differing <= PIXELS * sum(one.mask.size for one in found)
