"""What LLVM says of this machine's CPU is asked once, and again when the processor, TVM or the file is another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tvm.target import codegen

from harness.compiler.targets.system_cpu import FILE, SystemCpu, system_cpu
from harness.runtime.system import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "proc/cpuinfo").exists(), reason="this system does not describe its processor"
)

ANOTHER = "a name that LLVM never gave"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which LLVM has been asked."""
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path / "cache"))
    assert asked().name == codegen.llvm_get_system_cpu()
    return tmp_path / "cache"


def asked() -> SystemCpu:
    """What a process is told that has not asked before."""
    system_cpu.cache_clear()
    try:
        return system_cpu()
    finally:
        system_cpu.cache_clear()


def change(cache: Path, how: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((cache / FILE).read_text())
    how(content)
    (cache / FILE).write_text(json.dumps(content))


def test_the_file_answers(cache: Path) -> None:
    change(cache, lambda content: content.update(name=ANOTHER))
    assert asked().name == ANOTHER


def test_a_process_that_finds_the_file_needs_no_tvm(cache: Path) -> None:
    code = "import sys; from harness.compiler.targets.llvm import cpu_name; print(cpu_name(), 'tvm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(" False\n")


@pytest.mark.parametrize("part", ["processors", "tvm"])
def test_another_processor_or_tvm_is_asked_anew(cache: Path, part: str) -> None:
    def other(content: dict[str, Any]) -> None:
        content["name"] = ANOTHER
        content["made by"][part].append("another one")

    change(cache, other)
    assert asked().name != ANOTHER
    assert json.loads((cache / FILE).read_text())["name"] != ANOTHER, "the answer replaces the other one"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"made by": null}'], ids=range(5))
def test_a_damaged_file_is_replaced(cache: Path, content: str) -> None:
    kept = (cache / FILE).read_text()
    (cache / FILE).write_text(content)
    asked()
    assert (cache / FILE).read_text() == kept


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAM3_TVM_CACHE", str(tmp_path / "file"))
    assert asked().name == codegen.llvm_get_system_cpu()
