"""One folder for several CPUs: each machine takes its own code, and packs the weights once."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import asdict

from conformance.support import recurrent_segmenter
from conformance.support.commands import run_command
from conformance.support.recurrent_segmenter import CHANNELS, TOKENS
from conformance.support.recurrent_step import Step
from conformance.support.sentences import sentence
from harness.core.settings import REPOSITORY
from harness.models.registry import MODELS_VARIABLE
from harness.runtime.artifact import Artifact
from harness.runtime.cpu import MATRIX_UNIT, architecture, cpu_features, matrix_unit_problem
from harness.runtime.loading import LoadError
from harness.runtime.manifest import (
    MANIFEST,
    VARIANT,
    VARIANTS,
    ArtifactError,
    read_any_manifest,
    read_manifest,
    read_variants,
    weights_file,
)
from harness.runtime.preparing import prepared
from harness.runtime.weights import MappedWeights, file_digest

FOREIGN, LESS, BEST = {
    "x86_64": ("neoverse-n1", "x86-64-v2", "x86-64-v3"),
    "aarch64": ("x86-64-v3", "generic", "cortex-a57"),
}[architecture()]
"""A CPU of the other architecture, and two that every machine of this one has, the second with more features."""
WEIGHTS = weights_file("step")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), MODELS_VARIABLE: recurrent_segmenter.__name__}


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, folder=folder, environment=ENVIRONMENT)


def compiled(folder: Path, name: str, *options: str) -> Path:
    model = ("--model", "recurrent", "--strategy", "lowering", "--scale", "shallow")
    done = run("compile", *model, "--out", name, *options, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def for_cpus(*names: str) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--cpu", name))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For three CPUs, one of which is of another architecture; nothing of it was loaded yet."""
    return compiled(tmp_path_factory.mktemp("variants"), "any", *for_cpus(LESS, FOREIGN, BEST))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "any"))


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((TOKENS, CHANNELS), np.float32) for name in ("frame", "memory")}


def answers(artifact: Artifact) -> list[np.ndarray]:
    return [artifact.fetch(value).copy() for value in artifact.call("step", **inputs()).values()]


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


def test_weights_are_there_once_and_each_cpu_has_its_code(folder: Path) -> None:
    variants = read_variants(folder)
    assert variants.names == (LESS, FOREIGN, BEST)
    assert {path.name for path in folder.iterdir()} == {VARIANTS, WEIGHTS, *variants.names}
    assert variants.weights["step"][:2] == ("attend.weight", "attend.bias")
    for name in variants.names:
        manifest = read_manifest(folder / name, VARIANT)
        assert {path.name for path in (folder / name).iterdir()} == {VARIANT, *manifest.files}
        assert manifest.cpu == name
    assert read_any_manifest(folder).model == "recurrent"


@pytest.fixture(scope="module")
def alone(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the best CPU alone, compiled in the place of a folder for several."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(original, folder / "any")
    return compiled(folder, "any", *for_cpus(BEST))


def test_compiling_replaces_it(alone: Path) -> None:
    assert read_manifest(alone).cpu == BEST
    assert not (alone / VARIANTS).exists()


def runs_the_same(several: Path, alone: Path) -> None:
    loaded, expected = Artifact.load(several), Artifact.load(alone)
    assert loaded.folder == several / BEST
    assert same(answers(loaded), answers(expected))
    for name in ("entries", "precision", "cpu", "cpu_features"):
        assert getattr(loaded.manifest, name) == getattr(expected.manifest, name)
    assert loaded.manifest.files[WEIGHTS] == expected.manifest.files[WEIGHTS]


def test_it_runs_what_a_folder_for_this_cpu_alone_runs(folder: Path, alone: Path) -> None:
    runs_the_same(folder, alone)


@pytest.mark.wide
def test_it_does_so_in_half_precision(tmp_path: Path) -> None:
    several = compiled(tmp_path, "any", "--precision", "bf16", *for_cpus(LESS, BEST))
    assert MappedWeights(several / WEIGHTS).dtypes["attend.weight"] == "bfloat16"
    runs_the_same(several, compiled(tmp_path, "alone", "--precision", "bf16", *for_cpus(BEST)))


def test_weights_are_packed_once(folder: Path) -> None:
    told: list[str] = []
    assert prepared(folder, told.append) == folder / BEST
    assert told == [f"Packing the weights of {folder / BEST} for this CPU, once."]
    before = (folder / BEST / WEIGHTS).stat()
    assert prepared(folder, told.append) == folder / BEST
    assert len(told) == 1
    assert (folder / BEST / WEIGHTS).stat().st_ino == before.st_ino
    assert not (folder / LESS / MANIFEST).exists()


@pytest.mark.skipif(architecture() != "x86_64", reason="the matrix unit is one of x86-64")
def test_code_for_a_matrix_unit_is_taken_where_there_is_one(tmp_path: Path) -> None:
    folder = compiled(tmp_path, "any", *for_cpus(BEST, f"{BEST}+amx"))
    there = (cpu_features() or set()) >= set(MATRIX_UNIT) and matrix_unit_problem() is None
    assert Artifact.load(folder).folder == folder / (f"{BEST}+amx" if there else BEST)


def test_a_folder_in_which_an_earlier_version_timed_its_variants_loads(folder: Path) -> None:
    """The library that it timed, and the variant that it found to be the fastest, decide nothing any more."""
    for name in (LESS, BEST):
        manifest = json.loads((folder / name / VARIANT).read_text())
        (folder / name / "probe.so").write_text("a linear layer")
        manifest["files"]["probe.so"] = asdict(file_digest(folder / name / "probe.so"))
        (folder / name / VARIANT).write_text(json.dumps(manifest))
    (folder / "probed.json").write_text(json.dumps({"fastest": LESS}))
    assert Artifact.load(folder).folder == folder / BEST
    assert len(answers(Artifact.load(folder))) == 2


def test_a_variant_that_is_named_is_loaded_and_then_runs_alone(folder: Path, tmp_path: Path) -> None:
    expected = answers(Artifact.load(folder / LESS))
    shutil.copytree(folder / LESS, tmp_path / "alone")
    shutil.rmtree(folder)
    assert same(answers(Artifact.load(tmp_path / "alone")), expected)


def test_a_variant_without_its_weights_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / BEST, tmp_path / "alone" / BEST)
    with pytest.raises(ArtifactError, match=sentence("no-manifest", folder="alone", name=VARIANTS)):
        Artifact.load(tmp_path / "alone" / BEST)


def test_a_folder_for_other_cpus_says_what_each_is_for(folder: Path) -> None:
    description = json.loads((folder / VARIANTS).read_text())
    (folder / VARIANTS).write_text(json.dumps(description | {"names": [FOREIGN]}))
    with pytest.raises(LoadError, match=sentence("no-code-for-cpu", folder="any", reasons=FOREIGN)):
        Artifact.load(folder)


def test_a_damaged_file_is_found_before_it_is_packed(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ArtifactError, match=sentence("wrong-checksum", folder=WEIGHTS)):
        Artifact.load(folder)
    assert not {MANIFEST, WEIGHTS, ".packing"} & {path.name for path in (folder / BEST).iterdir()}


@pytest.mark.parametrize("content", ["{", '{"format": 1}', '{"format": 1, "names": [], "weights": {}, "files": {}}'])
def test_a_damaged_description_is_a_sentence(folder: Path, content: str) -> None:
    (folder / VARIANTS).write_text(content)
    with pytest.raises(ArtifactError, match=sentence("damaged-manifest", "unreadable-manifest", path=VARIANTS)):
        Artifact.load(folder)


LOAD = "import sys; from harness.runtime.artifact import Artifact; print(Artifact.load(sys.argv[1]).folder)"


def load_elsewhere(folder: Path, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    words = [sys.executable, "-c", LOAD, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=ENVIRONMENT, preexec_fn=limit)


def test_a_disk_without_room_is_a_sentence_and_leaves_nothing_half_written(folder: Path) -> None:
    done = load_elsewhere(folder, largest_file=64)
    assert done.returncode != 0
    assert re.search(sentence("cannot-pack", folder=folder, error="File too large"), done.stderr)
    assert not {MANIFEST, WEIGHTS, ".packing"} & {path.name for path in (folder / BEST).iterdir()}
    assert load_elsewhere(folder).stdout.strip() == str(folder / BEST)


def test_what_a_killed_process_left_is_replaced(folder: Path) -> None:
    (folder / BEST / ".packing").mkdir()
    (folder / BEST / ".packing" / WEIGHTS).write_text("half of it")
    (folder / BEST / WEIGHTS).write_text("renamed before its manifest was")
    assert len(answers(Artifact.load(folder))) == 2


def test_processes_that_load_it_at_once_share_what_one_packs(folder: Path) -> None:
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(load_elsewhere, [folder] * 4))
    assert [done.stdout.strip() for done in ended] == [str(folder / BEST)] * 4, [done.stderr for done in ended]
    assert len(answers(Artifact.load(folder))) == 2


def test_other_weights_are_put_into_it(folder: Path, tmp_path: Path) -> None:
    before = answers(Artifact.load(folder))
    done = run("pack", "--into", "any", "--seed", "1", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (folder / BEST / MANIFEST).exists()
    loaded = Artifact.load(folder)
    assert loaded.manifest.weights == "seed 1"
    after = answers(loaded)
    with torch.no_grad():
        expected = Step(seed=1).eval()(*map(torch.from_numpy, inputs().values()))
    for found, wanted, earlier in zip(after, expected, before, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-5)
        assert not np.array_equal(found, earlier)


def test_weights_that_its_code_does_not_take_are_not_put_into_it(folder: Path, tmp_path: Path) -> None:
    """As those of a folder that was compiled when other layers were in half precision."""
    for name in read_variants(folder).names:
        manifest = json.loads((folder / name / VARIANT).read_text())
        (folder / name / VARIANT).write_text(json.dumps(manifest | {"precision": "bf16"}))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = run("pack", "--into", "any", "--seed", "1", folder=tmp_path)
    assert done.returncode == 2
    assert re.search(sentence("other-version", entry="step"), done.stderr.splitlines()[-1])
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--cpu", "x86-64-v3", "--cpu", "x86-64-v3"), sentence("cpu-twice", repeated="x86-64-v3")),
        (
            ("--target", "cuda", "--cpu", "x86-64-v3", "--cpu", "znver4"),
            sentence("several-cpus-one-target", name="llvm", target="cuda"),
        ),
        (("--cpu", BEST, "--cpu", "pentium9"), sentence("unknown-cpu", name="pentium9")),
    ],
)
def test_cpus_that_make_no_sense_are_a_sentence(options: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    done = run("compile", "--model", "recurrent", "--out", "any", *options, folder=tmp_path)
    assert done.returncode == 2
    assert re.search(expected, done.stderr)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_sends_a_folder_elsewhere_asks_for_one_cpu(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=sentence("several-cpus")):
        read_manifest(folder)
    with pytest.raises(ArtifactError, match=sentence("not-packed")):
        read_manifest(folder / BEST)


def test_the_manifest_of_a_variant_says_what_it_was_made_of(folder: Path) -> None:
    loaded = Artifact.load(folder)
    data = json.loads((folder / BEST / MANIFEST).read_text())
    assert {"compiled", "packed"} <= data["made"].keys()
    assert set(loaded.manifest.files) == {path.name for path in loaded.folder.iterdir()} - {
        MANIFEST,
        VARIANT,
        ".packing.lock",
    }
