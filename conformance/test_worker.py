"""The worker, with real faults: each ends one call, is told apart from the others, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from harness.errors import HarnessError
from harness.worker import DETAILS_BYTES, OUTPUT_BYTES, Standby, Stopped, WorkerEnd, WorkerResult, run_isolated

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """No process and no file may outlive a call."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    before = set(psutil.Process().children(recursive=True))
    yield
    assert [p for p in psutil.Process().children(recursive=True) if p not in before] == []
    assert list((tmp_path / "temporary").iterdir()) == []


def call(function: str, argument: object = None, **limits) -> WorkerResult:
    return run_isolated(f"conformance.misbehaviour:{function}", argument, **{"timeout": 60, **limits})


def is_gone(pid: int) -> bool:
    """Whether the process has ended; it may still wait to be collected by init."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_value_and_every_stage_come_back():
    argument = {"numbers": [1, 2.5, None], "bytes": b"\0" * 100}
    seen: list[str] = []
    result = call("echo", argument, breadcrumb=seen.append)
    assert result.kind is WorkerEnd.OK
    assert result.value == argument
    assert result.error is None
    assert [crumb.stage for crumb in result.breadcrumbs] == seen == ["first", "second"]
    assert result.stage == "second"
    assert 0 < result.breadcrumbs[0].seconds <= result.breadcrumbs[1].seconds <= result.seconds + 0.5
    assert 2**20 < result.peak_rss_bytes < 2**30


def test_stages_are_seen_while_the_child_runs():
    stages = ["build", "export", "import", "two\nlines"]
    seen: dict[str, float] = {}
    result = call("import_stages", stages, breadcrumb=lambda stage: seen.setdefault(stage, time.monotonic()))
    assert list(seen) == ["build", "export", "import", "two lines"]
    assert result.stage == "two lines"
    assert seen["import"] - seen["build"] > 0.02  # not all at once, at the end


def test_segmentation_fault():
    result = call("read_through_a_null_pointer")
    assert result.kind is WorkerEnd.CRASHED
    assert result.error.type == "SIGSEGV"
    assert "SIGSEGV" in result.error.message
    assert "before the crash" in result.error.message
    assert result.stage == "before the crash"
    assert "printed before the crash" in result.error.details
    assert "read_through_a_null_pointer" in result.error.details  # the Python stack at the time of the fault


def test_abort():
    result = call("abort")
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.CRASHED, "SIGABRT", "")


@pytest.mark.parametrize("code", [0, 3])
def test_a_child_that_leaves_without_an_answer_has_crashed(code):
    result = call("leave", code)
    assert (result.kind, result.error.type) == (WorkerEnd.CRASHED, "ExitCode")
    assert f"exit code {code}" in result.error.message


@pytest.mark.parametrize("function", ["hang_in_python", "hang_in_native_code"])
def test_a_hang_ends_at_the_time_limit(function):
    start = time.monotonic()
    result = call(function, timeout=5)
    assert 5 <= time.monotonic() - start < 60
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.TIMED_OUT, "TimeLimit", "hanging")
    assert "still running after 5 s, in stage hanging" in result.error.message


def test_another_thread_ends_a_call(tmp_path):
    pid, stop = tmp_path / "pid", threading.Event()

    def when_it_runs() -> None:
        while not pid.exists():
            time.sleep(0.02)
        stop.set()

    other = threading.Thread(target=when_it_runs)
    other.start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        call("tell_pid_and_wait", pid, stop=stop)
    other.join()
    assert time.monotonic() - start < 30
    assert is_gone(int(pid.read_text()))


@pytest.mark.parametrize("function", ["allocate", "allocate_in_a_grandchild"])
def test_an_allocation_beyond_the_limit(function):
    limit = 300 * 2**20
    result = call(function, 2**30, memory_limit_bytes=limit)
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.OUT_OF_MEMORY, "MemoryLimit", "allocating")
    assert "over the limit of 300 MiB, in stage allocating" in result.error.message
    assert limit < result.peak_rss_bytes <= 1.2 * 2**30


def test_an_allocation_within_the_limit_is_none_of_the_workers_business():
    assert call("take_and_give_back", 50 * 2**20, memory_limit_bytes=400 * 2**20).kind is WorkerEnd.OK


def test_an_allocation_that_the_system_refuses():
    result = call("ask_for_more_than_there_is")
    assert (result.kind, result.error.type) == (WorkerEnd.OUT_OF_MEMORY, "MemoryError")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process that has ended its use")
def test_the_peak_is_seen_even_between_two_looks():
    result = call("take_and_give_back", 200 * 2**20)
    assert result.peak_rss_bytes > 200 * 2**20


def test_the_parents_own_memory_does_not_count():
    ballast = bytearray(b"x") * (400 * 2**20)
    assert call("echo").peak_rss_bytes < len(ballast)


def test_an_exception():
    result = call("fail", "no such thing\nsecond line")
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.FAILED, "LookupError", "failing")
    assert result.error.message == "no such thing\nsecond line"
    assert "misbehaviour.py" in result.error.details
    assert result.value is None


def test_a_users_mistake_is_raised_here_as_it_was_there():
    with pytest.raises(HarnessError, match=r"^photo\.jpg is a text file$"):
        call("blame_the_user", "photo.jpg is a text file")


@pytest.mark.parametrize("function", ["nowhere", "return_a_lambda"])
def test_a_function_that_is_missing_or_returns_what_cannot_travel(function):
    result = call(function)
    assert result.kind is WorkerEnd.FAILED
    assert result.error.type in ("AttributeError", "PicklingError", "TypeError")


def test_an_unknown_module():
    result = run_isolated("no.such.module:function", None, timeout=60)
    assert (result.kind, result.error.type) == (WorkerEnd.FAILED, "ModuleNotFoundError")


def test_a_child_that_reads_its_input_gets_nothing():
    assert call("read_stdin").value == ""


def test_killed_from_outside(tmp_path):
    path = tmp_path / "pid"

    def kill() -> None:
        while not path.exists():
            time.sleep(0.01)
        os.kill(int(path.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    result = call("tell_pid_and_wait", path)
    thread.join()
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.CRASHED, "SIGKILL", "waiting")
    assert "lack of memory" in result.error.message


def test_output_of_any_size_ends_in_a_short_tail():
    megabytes = 2 * OUTPUT_BYTES // 10**6
    result = call("shout", megabytes)
    assert (result.kind, result.error.type) == (WorkerEnd.CRASHED, "SIGABRT")
    assert len(result.error.details) <= DETAILS_BYTES
    assert "the last line" in result.error.details


@pytest.mark.parametrize("leaves", ["stays", "leaves"])
@pytest.mark.parametrize("waits", [True, False], ids=["hangs", "returns"])
def test_a_grandchild_dies_with_its_parent(tmp_path, leaves, waits):
    """Whether the child waits for it until the time limit or returns without it, in its process group or out of it."""
    path = tmp_path / "pid"
    result = call("spawn_a_stubborn_grandchild", (path, leaves, waits), timeout=8 if waits else 60)
    assert result.kind is (WorkerEnd.TIMED_OUT if waits else WorkerEnd.OK)
    assert result.stage == "spawned"
    assert is_gone(int(path.read_text()))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_when_the_parent_is_ended_the_child_ends_too(tmp_path, end):
    """Ctrl-C unwinds the parent and removes the folder; after a SIGKILL the child sees by itself that it is alone."""
    path, temporary = tmp_path / "pid", tmp_path / "of the parent"
    temporary.mkdir()
    code = (
        "import pathlib, sys; from harness.worker import run_isolated;"
        "run_isolated('conformance.misbehaviour:tell_pid_and_wait', pathlib.Path(sys.argv[1]))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    while not path.exists():
        assert parent.poll() is None
        time.sleep(0.01)
    child = int(path.read_text())
    assert psutil.pid_exists(child)
    parent.send_signal(end)
    _, error = parent.communicate(timeout=120)
    assert is_gone(child)
    if end == signal.SIGINT:
        assert b"KeyboardInterrupt" in error
        assert list(temporary.iterdir()) == []


def test_an_error_in_the_callback_ends_the_child():
    def refuse(stage: str) -> None:
        raise RuntimeError(f"no {stage}, please")

    with pytest.raises(RuntimeError, match="no hanging, please"):
        call("hang_in_python", breadcrumb=refuse)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def started(standby: Standby) -> psutil.Process:
    before = children()
    standby.start()
    (waiting,) = (child for child in children() if child not in before)
    return waiting


def test_a_worker_can_be_started_ahead_of_its_call():
    standby = Standby("conformance.misbehaviour:load")
    waiting = started(standby)
    known = children()
    standby.start()
    assert children() == known
    result = call("what_was_loaded", standby=standby)
    assert result.value == (waiting.pid, str(waiting.pid))
    assert call("what_was_loaded", standby=standby).value[0] != waiting.pid
    assert call("what_was_loaded").value[1] is None


def test_a_worker_that_waits_ends_when_it_is_no_longer_needed():
    standby = Standby("conformance.misbehaviour:load")
    waiting = started(standby)
    standby.close()
    assert is_gone(waiting.pid)
    standby.close()


@pytest.mark.parametrize("load", ["load_what_is_missing", "no_such_function"])
def test_what_cannot_be_loaded_is_left_to_the_call(load):
    assert call("what_was_loaded", standby=Standby(f"conformance.misbehaviour:{load}")).value[1] is None


def test_a_worker_that_dies_while_it_loads_is_a_crash():
    result = call("what_was_loaded", standby=Standby("conformance.misbehaviour:load_and_die"))
    assert result.kind is WorkerEnd.CRASHED
    assert result.error is not None
    assert result.error.type == "SIGABRT"


def test_a_worker_that_waits_ends_with_its_parent():
    code = (
        "import time; from harness.worker import Standby;"
        "standby = Standby('conformance.misbehaviour:load'); standby.start();"
        "print('started', flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    (waiting,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.communicate(timeout=60)
    assert is_gone(waiting.pid)
