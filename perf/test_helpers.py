"""Tests of the suites' own parts: interleaved rounds, comparisons with stored runs, and options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.core.settings import REPOSITORY
from perf.measuring import LONG_SECONDS, Side, interleave, interleave_sides


def test_two_sides_are_interleaved_and_swap_places(benchmark: Any) -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> Any:
        def call() -> None:
            if not order or order[-1] != name:
                order.append(name)
            time.sleep(seconds)

        return call

    timed = interleave(benchmark, side("tvm", 0.02), side("torch", 0.04), budget=0.0, least=4)
    # Both are called once to know how long they take; then torch, TVM, TVM, torch, torch, TVM, TVM, torch.
    assert order == ["tvm", "torch", "tvm", "torch", "tvm", "torch"]
    assert len(timed.tvm) == len(timed.torch) == 4
    assert min(timed.tvm) >= 0.02 and min(timed.torch) >= 0.04
    assert 1.5 < timed.summary()["torch_over_tvm"] < 2.5
    assert timed.summary()["p95"] == "n/a"


def test_short_calls_are_repeated_within_a_round(benchmark: Any) -> None:
    timed = interleave(benchmark, lambda: time.sleep(0.001), lambda: time.sleep(0.001), budget=0.0, batch=0.01)
    assert len(timed.tvm) == 5
    assert min(benchmark.stats.stats.data) >= 0.005
    assert max(timed.tvm) < 0.005


def test_any_number_of_sides_are_interleaved(benchmark: Any) -> None:
    order: list[str] = []
    lengths = {"a": 0.02, "b": 0.04, "c": 0.005}

    def side(name: str) -> Any:
        def call() -> None:
            if not order or order[-1] != name:
                order.append(name)
            time.sleep(lengths[name])

        return call

    seconds = interleave_sides(benchmark, {name: side(name) for name in lengths}, budget=0.0, least=3, batch=0.01)
    # All are called to know how long they take; then a b c, b c a, c a b.
    assert order == [*"abc", *"abc", *"bca", *"cab"]
    assert {name: len(rounds) for name, rounds in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    for name, rounds in seconds.items():
        assert lengths[name] <= min(rounds) <= 1.5 * lengths[name]


def test_a_warm_up_ends_with_a_call_that_is_as_fast_as_before() -> None:
    slow = iter([0.002] * 20)
    side = Side(lambda: time.sleep(0.0005 + next(slow, 0.0)), fastest=0.0006)
    side.warm_up()
    assert next(slow, None) is None


def test_a_long_call_has_no_warm_up() -> None:
    side = Side(lambda: pytest.fail("called"), fastest=LONG_SECONDS)
    side.warm_up()


def info(*ours: float) -> dict[str, Any]:
    """What test_components.py keeps, as far as it is compared."""
    return {"sides": {"torch": {"seconds": [2.0] * len(ours)}, "untuned": {"seconds": list(ours)}}}


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A suite with one case, whose rounds are in a file; runs pytest on it with the options of this project."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "conftest.py").write_text(
        f"exec(open({str(REPOSITORY / 'conftest.py')!r}).read())\n"
        "root_configure = pytest_configure\n"
        "from perf.conftest import *\n"
        "perf_configure = pytest_configure\n"
        "def pytest_configure(config):\n    perf_configure(config)\n    root_configure(config)\n"
    )
    (tmp_path / "test_suite.py").write_text(
        "import json, pathlib, pytest\n"
        "@pytest.mark.parametrize('path', [pathlib.Path('file')])\n"
        "def test_case(benchmark, path):\n"
        "    benchmark.pedantic(lambda: None)\n"
        "    benchmark.extra_info |= json.loads(pathlib.Path('info.json').read_text())\n"
    )

    def run(info: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "info.json").write_text(json.dumps(info))
        command = [sys.executable, "-m", "pytest", "-q", "test_suite.py", *options]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def test_a_slowdown_against_a_stored_run_fails(suite: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    stored = suite(info(1.0, 1.01, 1.02, 1.0, 1.01), "--benchmark-json=stored.json")
    assert stored.returncode == 0, stored.stdout + stored.stderr
    same = suite(info(1.01, 1.0, 1.02, 1.01, 1.0), "--benchmark-compare=stored.json")
    assert same.returncode == 0, same.stdout + same.stderr
    assert "nothing of ours is slower" in same.stdout
    slower = suite(info(1.5, 1.51, 1.52, 1.5, 1.51), "--benchmark-compare=stored.json")
    assert slower.returncode == 1
    assert "slower: test_case[path0], untuned, 1.50 times the time" in slower.stdout
    faster = suite(info(0.5, 0.51, 0.52, 0.5, 0.51), "--benchmark-compare=stored.json")
    assert faster.returncode == 0 and "faster" in faster.stdout


def test_what_was_measured_is_kept_and_not_measured_again(
    suite: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    first = suite(info(1.0), "--keep=kept", "-rs")
    assert first.returncode == 0 and "1 passed" in first.stdout, first.stdout + first.stderr
    (kept,) = (tmp_path / "kept").iterdir()
    assert json.loads(kept.read_text())["benchmarks"][0]["extra_info"] == info(1.0)
    again = suite(info(2.0), "--keep=kept", "-rs")
    assert "1 skipped" in again.stdout and "measured before" in again.stdout, again.stdout
    assert json.loads(kept.read_text())["benchmarks"][0]["extra_info"] == info(1.0)
    otherwise = suite(info(2.0), "--keep=kept", "--rounds=7")
    assert "1 passed" in otherwise.stdout, otherwise.stdout
    assert json.loads(kept.read_text())["benchmarks"][0]["extra_info"] == info(2.0)
    kept.write_text("{")
    broken = suite(info(3.0), "--keep=kept", "--rounds=7")
    assert "1 passed" in broken.stdout, broken.stdout
    assert json.loads(kept.read_text())["benchmarks"][0]["extra_info"] == info(3.0)


def test_what_failed_is_not_kept(suite: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    with (tmp_path / "test_suite.py").open("a") as test:
        test.write("    assert False\n")
    assert suite(info(1.0), "--keep=kept").returncode == 1
    assert not list((tmp_path / "kept").iterdir())


def test_what_cannot_be_compared_is_a_sentence(suite: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    missing = suite(info(1.0), "--benchmark-compare=missing.json")
    assert missing.returncode == pytest.ExitCode.USAGE_ERROR
    assert "cannot compare with missing.json: there is no such file" in missing.stderr
    broken = suite(info(1.0), "--benchmark-compare=info.json")  # a file, but not of a run
    assert broken.returncode == 1
    assert "error: cannot compare: there is no stored run info.json" in broken.stdout
    assert "INTERNALERROR" not in missing.stdout + missing.stderr + broken.stdout + broken.stderr


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--rounds=0", "cannot measure 0 rounds"),
        ("--db=nowhere", "there is no tuning database in nowhere"),
        ("--keep=test_suite.py/kept", "cannot write"),
        ("--peer=onnx", "Unknown peer 'onnx': known are openvino, openvino f32, onnxruntime, torch.compile"),
        ("--peer=torch bf16", "'torch bf16' is measured beside other cases: add --target llvm --precision bf16."),
    ],
)
def test_options_that_make_no_sense_are_a_sentence(
    option: str, sentence: str, suite: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ended = suite(info(1.0), option)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert sentence in ended.stderr and "Traceback" not in ended.stderr
