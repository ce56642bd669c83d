"""Which variant of a folder in fp32 is taken where a matrix unit may be faster than vectors, or not."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tvm
from filelock import FileLock

from conformance.deployment.test_variants import compiled, for_cpus
from conformance.support.amx import target_with_tiles
from conformance.support.kernels import functions_of
from harness.core.settings import REPOSITORY
from harness.deployment.probe import layer, needs_probe, write_probe
from harness.execution.emulation.matrix_unit import emulate, emulated_products, emulation_problem
from harness.runtime.artifact import Artifact
from harness.runtime.cpu import MATRIX_UNIT, cpu_features
from harness.runtime.loading import LoadError
from harness.runtime.manifest import PROBE_LIBRARY, PROBED
from harness.runtime.matrix_unit import matrix_unit_problem
from harness.runtime.preparing import prepared
from harness.runtime.probing import WORTH_IT, fastest, layer_seconds
from harness.targets import HOST
from harness.targets.compiling import build_library, lower_module

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the matrix unit is one of x86-64")

SSE, AVX2, UNIT = "x86-64-v2", "x86-64-v3", "sapphirerapids+amx"


def target(cpu: str) -> tvm.target.Target:
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu})


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Variants with nothing but their probes, of which the second is several times as fast as the others."""
    folder = tmp_path_factory.mktemp("probes")
    for name in (SSE, AVX2):
        (folder / name).mkdir()
        write_probe(folder / name, target(name))
    (folder / UNIT).mkdir()
    lowered = lower_module(layer(), HOST, target_with_tiles(AVX2))
    assert any("bf16x6_amx" in name for name in functions_of(lowered))
    build_library(lowered, target_with_tiles(AVX2), folder / UNIT / PROBE_LIBRARY)
    return folder


@pytest.fixture
def folder(probes: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(probes, tmp_path / "any"))


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unit, emulated."""
    if problem := emulation_problem():
        pytest.skip(problem)
    emulate()
    monkeypatch.setattr("harness.runtime.cpu._emulated", set(MATRIX_UNIT))


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("names", [(SSE, AVX2), (AVX2, SSE), (AVX2, UNIT), (UNIT, AVX2)])
def test_the_fastest_is_taken(names: tuple[str, str], folder: Path) -> None:
    """Vectors of twice the length are, and a unit that is emulated is not; a real one may be."""
    found = fastest(folder, names)
    kept = json.loads((folder / PROBED).read_text())
    first, second = (kept["seconds"][name] for name in names)
    assert found == kept["fastest"] == names[second <= WORTH_IT * first]
    assert found == AVX2 or (UNIT in names and emulated_products() == 0)


def test_what_was_found_is_kept_for_this_machine(folder: Path) -> None:
    """Until the file is removed, or is of another machine, or says nothing that can be read."""
    names, file = (SSE, AVX2), folder / PROBED
    assert fastest(folder, names) == AVX2
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"fastest": SSE}))
    assert fastest(folder, names) == SSE
    elsewhere = kept["here"] | {"cpu": "another one"}
    for text in (json.dumps(kept | {"fastest": SSE, "here": elsewhere}), '{"fastest"', "[]", '{"fastest": "other"}'):
        file.write_text(text)
        assert fastest(folder, names) == AVX2, text
        assert json.loads(file.read_text())["here"] == kept["here"]
    file.unlink()
    assert fastest(folder, names) == AVX2
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {SSE, AVX2, UNIT, PROBED}


def test_one_process_at_a_time_finds_it(folder: Path) -> None:
    """The others wait for its answer, because what they compute would disturb its times."""
    names = (SSE, AVX2)
    asking = f"print('asking', flush=True); print(fastest(Path({str(folder)!r}), {names!r}))"
    imports = "from pathlib import Path; from harness.runtime.probing import fastest"
    assert fastest(folder, names) == AVX2
    known = json.loads((folder / PROBED).read_text())
    (folder / PROBED).unlink()
    command = [sys.executable, "-c", f"{imports}; {asking}"]
    with FileLock(folder / ".probing.lock"):
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
        assert other.stdout is not None and other.stdout.readline() == "asking\n"
        time.sleep(3)  # timing takes less than a second
        assert not (folder / PROBED).exists()
        (folder / PROBED).write_text(json.dumps(known | {"fastest": SSE}))
    assert other.communicate(timeout=120)[0] == f"{SSE}\n"


def test_a_folder_that_cannot_be_locked_is_asked_all_the_same(folder: Path) -> None:
    (folder / ".probing.lock").mkdir()
    assert fastest(folder, (SSE, AVX2)) == AVX2


def test_a_probe_that_is_not_there_is_a_sentence(folder: Path) -> None:
    (folder / AVX2 / PROBE_LIBRARY).unlink()
    with pytest.raises(LoadError, match=f"{AVX2}/{PROBE_LIBRARY} cannot be read"):
        fastest(folder, (SSE, AVX2))
    assert not (folder / PROBED).exists()


def test_folders_in_fp32_for_a_unit_are_probed(tmp_path: Path) -> None:
    with_unit, without = target_with_tiles("sapphirerapids"), target("sapphirerapids")
    assert needs_probe("fp32", [without, with_unit])
    assert not needs_probe("bf16", [without, with_unit]) and not needs_probe("fp32", [without])
    folder = compiled(tmp_path, "any", *for_cpus(AVX2, UNIT))
    assert all((folder / name / PROBE_LIBRARY).is_file() for name in (AVX2, UNIT))
    if set(MATRIX_UNIT) <= (cpu_features() or set()) and matrix_unit_problem() is None:
        assert prepared(folder).name == json.loads((folder / PROBED).read_text())["fastest"]
        assert layer_seconds({UNIT: folder / UNIT / PROBE_LIBRARY})[UNIT] > 0
    else:
        assert Artifact.load(folder).folder == folder / AVX2
        assert not (folder / PROBED).exists(), "one variant alone runs here"
