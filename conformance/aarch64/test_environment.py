"""What the emulated machine shows of its processor, and what is said where it cannot be set up; nothing is emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.aarch64.cpuinfo import cpuinfo
from conformance.aarch64.environment import ROOT, folder
from harness.runtime.cpu import architecture, arm_model, features_of_linux

elsewhere = pytest.mark.skipif(architecture() == "aarch64", reason="an AArch64 machine is used as it is")


def test_a_processor_with_neon_and_one_with_everything(tmp_path: Path) -> None:
    """The words are those that QEMU 7.2 gives."""
    text = cpuinfo("neoverse-n1", 0x119FFB, 0, 3)
    features = features_of_linux(text)
    assert features is not None
    assert {"neon", "fp-armv8", "fullfp16", "lse", "rdm", "dotprod"} <= features
    assert not {"sve", "i8mm", "bf16"} & features
    assert text.count("processor\t") == 3
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert arm_model(tmp_path) == "Arm Neoverse-N1"
    everything = features_of_linux(cpuinfo("max", 0xECFFFFFB, 0x7F877FFF, 1))
    assert everything is not None and features | {"sve", "sve2", "i8mm", "bf16"} <= everything


def in_empty_cache(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "SAM3_TVM_CACHE": str(cache), **environment},
        check=False,
    )


@elsewhere
def test_without_the_programs_of_debian_it_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = in_empty_cache(tmp_path / "cache", "-m", "conformance.aarch64", PATH=str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: apt-get and dpkg-deb are missing") and "Debian" in line
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path / "cache"))
    assert not (folder() / "qemu").exists() and not (folder() / "root").exists()


@elsewhere
def test_a_command_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("apt-get", "dpkg-deb"):
        (programs / name).write_text("#!/bin/sh\necho 'E: there is no network' >&2\nexit 100\n")
        (programs / name).chmod(0o755)
    done = in_empty_cache(tmp_path / "cache", "-m", "conformance.aarch64", PATH=f"{programs}:/usr/bin:/bin")
    assert done.returncode == 2
    assert done.stderr == ("error: Debian's lists of packages cannot be fetched (apt-get: E: there is no network)\n")


@elsewhere
def test_a_machine_that_is_not_set_up_is_an_error_of_pytest(tmp_path: Path) -> None:
    suite = ("-m", "pytest", "-p", "no:cacheprovider", "--aarch64", "--collect-only", "-q", "conformance/aarch64")
    done = in_empty_cache(tmp_path, *suite)
    assert done.returncode == 4, done.stdout
    assert "there is no emulated AArch64 machine of this version" in done.stderr
    assert "make test-arm sets it up" in done.stderr
