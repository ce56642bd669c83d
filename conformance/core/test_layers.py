"""Each test belongs to a layer, and fails when it costs more CPU time than its layer allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from conformance import layers
from conformance.core.test_selection import run_pytest
from conformance.support.examples import examples

ROOT = layers.DURATIONS.parents[1]

DEAR = """
import subprocess, sys, time
import pytest

BURN = "import time\\nwhile time.process_time() < 0.5: pass"

def burn():
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass

@pytest.mark.law
def test_dear_law():
    burn()

@pytest.mark.law
def test_dear_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

@pytest.mark.law
def test_slow_and_cheap():
    time.sleep(0.5)

@pytest.mark.kernel
def test_kernel():
    burn()

def test_no_layer():
    burn()
"""


def test_a_test_that_costs_more_than_its_layer_allows_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_dear.py").write_text(DEAR)
    with pytest.MonkeyPatch.context() as patch:  # this test itself is a law
        patch.setitem(layers.LAYERS, "law", (0.25, ""))
        run_pytest("-p", "conformance.layers", f"--rootdir={tmp_path}", "-rf", str(tmp_path))
    output = capsys.readouterr().out
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert [line.split("::")[1].split(" ")[0] for line in failed] == ["test_dear_law", "test_dear_child"]
    assert output.count("CPU seconds, and the layer `law` allows 0.25: make it cheaper, or mark it") >= len(failed)
    assert "layers: law 3 in " in output and ", kernel 1 in " in output


def test_folders_and_files_that_the_layers_name_exist() -> None:
    folders = [folder for names in layers.FOLDERS.values() for folder in names]
    assert len(folders) == len(set(folders))
    assert all(any((ROOT / "conformance" / folder).rglob("test_*.py")) for folder in folders)
    assert all((ROOT / file).is_file() for file in layers.recorded())


def test_a_profile_shows_other_examples_and_more_of_them() -> None:
    profile = settings.get_current_profile_name()
    try:
        settings.load_profile("deterministic")
        few = examples(3)
        settings.load_profile("explore")
        more = examples(3)
    finally:
        settings.load_profile(profile)
    assert (few.max_examples, few.derandomize, few.database) == (3, True, None)
    assert (more.max_examples, more.derandomize, more.print_blob) == (30, False, True)
    assert more.database is not None


def test_a_test_that_is_skipped_for_no_known_reason_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "conformance"
    suite.mkdir()
    (suite / "test_skipped.py").write_text(
        "import pytest\n"
        "def test_known(): pytest.skip('Chromium is not installed: apt install chromium')\n"
        "def test_unknown(): pytest.skip('it is late')\n"
        "@pytest.mark.skipif(True, reason='it is early')\n"
        "def test_marked(): pass\n"
        "@pytest.mark.xfail(reason='a defect', strict=True)\n"
        "def test_expected(): assert False\n"
    )
    run_pytest("-p", "conformance.skips", f"--rootdir={tmp_path}", str(suite))
    output = capsys.readouterr().out
    assert "1 skipped, 1 xfailed, " in output and "1 failed" in output and "1 error" in output
    assert "does not say where a test runs that is skipped here: it is late" in output
    assert "does not say where a test runs that is skipped here: it is early" in output
