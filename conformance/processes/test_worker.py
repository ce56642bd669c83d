"""The worker, with real faults: each ends one call, is told apart from the others, and leaves nothing behind.

Most tests run twice: in a fresh interpreter, and in a fork of a template.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from conformance.support.sentences import sentence
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.processes.call import (
    DETAILS_BYTES,
    OUTPUT_BYTES,
    Stopped,
    Template,
    WorkerEnd,
    WorkerResult,
    kill_and_collect,
    run_isolated,
    start_python,
)
from harness.verify.runner import Limits, library_template, verify_case

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def no_traces(folder: Path) -> Iterator[None]:
    """No process and no file in the folder for temporary ones may outlive what is called inside."""
    folder.mkdir()
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        yield
    assert [p for p in psutil.Process().children(recursive=True) if p not in before] == []
    # PyTorch makes a folder for what it compiles as soon as it is imported, and keeps it.
    assert [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")] == []


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    with no_traces(tmp_path / "temporary"):
        yield


class Call(Protocol):
    """Calls a function of `misbehaviour.py` in a process of its own."""

    def __call__(self, function: str, argument: object = None, **limits) -> WorkerResult: ...


@pytest.fixture(params=["spawned", "forked"])
def call(request: pytest.FixtureRequest, nothing_left_behind: None) -> Iterator[Call]:
    with closing(Template("conformance.support.misbehaviour:load")) as template:
        used = template if request.param == "forked" else None

        def called(function: str, argument: object = None, **limits) -> WorkerResult:
            return run_isolated(
                f"conformance.support.misbehaviour:{function}", argument, **{"timeout": 60, "template": used, **limits}
            )

        yield called


def is_gone(pid: int) -> bool:
    """Whether the process has ended; it may still wait to be collected by init."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_a_value_and_every_stage_come_back(call):
    argument = {"numbers": [1, 2.5, None], "bytes": b"\0" * 100}
    seen: list[str] = []
    result = call("echo", argument, on_stage=seen.append)
    assert result.kind is WorkerEnd.OK
    assert result.value == argument
    assert result.error is None
    assert [crumb.stage for crumb in result.breadcrumbs] == seen == ["first", "second"]
    assert result.stage == "second"
    assert 0 <= result.breadcrumbs[0].seconds <= result.breadcrumbs[1].seconds <= result.seconds + 0.5
    assert 2**20 < result.peak_rss_bytes < 2**30


def test_stages_are_seen_while_the_child_runs(call):
    stages = ["build", "export", "import", "two\nlines"]
    seen: dict[str, float] = {}
    result = call("import_stages", stages, on_stage=lambda stage: seen.setdefault(stage, time.monotonic()))
    assert list(seen) == ["build", "export", "import", "two lines"]
    assert result.stage == "two lines"
    assert seen["import"] - seen["build"] > 0.02  # not all at once, at the end


@pytest.mark.parametrize("how", ["returns", "dies"])
def test_temporary_files_go_with_the_call(call, how):
    """That none is left is seen by a fixture."""
    result = call("leave_files", how)
    assert result.stage == "left"
    assert how != "returns" or not Path(result.value).exists()


def test_segmentation_fault(call):
    result = call("read_through_a_null_pointer")
    assert result.kind is WorkerEnd.CRASHED
    assert result.error.type == "SIGSEGV"
    assert "SIGSEGV" in result.error.message
    assert "before the crash" in result.error.message
    assert result.stage == "before the crash"
    assert "printed before the crash" in result.error.details
    assert "read_through_a_null_pointer" in result.error.details  # the Python stack at the time of the fault


def test_abort(call):
    result = call("abort")
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.CRASHED, "SIGABRT", "")


@pytest.mark.parametrize("code", [0, 3])
def test_a_child_that_leaves_without_an_answer_has_crashed(call, code):
    result = call("leave", code)
    assert (result.kind, result.error.type) == (WorkerEnd.CRASHED, "ExitCode")
    assert f"exit code {code}" in result.error.message


LIMIT = 8


@dataclass(frozen=True)
class Hung:
    """A call that did not end by itself.

    Attributes:
        result: What it ended with.
        seconds: How long it took.
        is_gone: Whether the grandchild had ended by then; True if there was none.
    """

    result: WorkerResult
    seconds: float
    is_gone: bool


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Hung]:
    """Everything that hangs until its time limit, spawned and forked, all at the same time."""
    folder = tmp_path_factory.mktemp("hung")

    def call(kind: str, name: str, template: Template) -> Hung:
        pid = folder / f"{kind} {name}"
        function, argument = {
            "python": ("hang_in_python", None),
            "native code": ("hang_in_native_code", None),
            "stays": ("spawn_a_stubborn_grandchild", (pid, "stays", True)),
            "leaves": ("spawn_a_stubborn_grandchild", (pid, "leaves", True)),
            "files": ("leave_files", "waits"),
        }[name]
        start = time.monotonic()
        result = run_isolated(
            f"conformance.support.misbehaviour:{function}",
            argument,
            timeout=LIMIT,
            template=template if kind == "forked" else None,
        )
        seconds = time.monotonic() - start
        return Hung(result, seconds, not pid.exists() or is_gone(int(pid.read_text())))

    names = [(kind, name) for kind in ("spawned", "forked") for name in HANGING]
    with (
        no_traces(folder / "temporary"),
        closing(Template("conformance.support.misbehaviour:load")) as template,
        ThreadPoolExecutor(len(names)) as pool,
    ):
        return dict(zip(names, pool.map(lambda each: call(*each, template), names), strict=True))


HANGING = {"python": "hanging", "native code": "hanging", "stays": "spawned", "leaves": "spawned", "files": "left"}
"""What hangs, in Python, in native code, waiting for a grandchild, with temporary files; and the stage it is in."""


@pytest.mark.parametrize("kind", ["spawned", "forked"])
@pytest.mark.parametrize("name", HANGING)
def test_a_hang_ends_at_the_time_limit(hung, name, kind):
    """With its grandchild, in its process group or out of it; that no file is left is seen by the fixture."""
    ended, stage = hung[kind, name], HANGING[name]
    assert LIMIT <= ended.seconds < 60
    assert (ended.result.kind, ended.result.error.type) == (WorkerEnd.TIMED_OUT, "TimeLimit")
    assert ended.result.stage == stage
    assert f"still running after {LIMIT} s, in stage {stage}" in ended.result.error.message
    assert ended.is_gone


def test_another_thread_ends_a_call(call, tmp_path):
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
def test_an_allocation_beyond_the_limit(call, function):
    limit = 300 * 2**20
    result = call(function, 2**30, memory_limit_bytes=limit)
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.OUT_OF_MEMORY, "MemoryLimit", "allocating")
    assert "over the limit of 300 MiB, in stage allocating" in result.error.message
    assert limit < result.peak_rss_bytes <= 1.2 * 2**30


def test_an_allocation_within_the_limit_is_none_of_the_workers_business(call):
    assert call("take_and_give_back", 50 * 2**20, memory_limit_bytes=400 * 2**20).kind is WorkerEnd.OK


def test_an_allocation_that_the_system_refuses(call):
    result = call("ask_for_more_than_there_is")
    assert (result.kind, result.error.type) == (WorkerEnd.OUT_OF_MEMORY, "MemoryError")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process that has ended its use")
def test_the_peak_is_seen_even_between_two_looks(call):
    result = call("take_and_give_back", 200 * 2**20)
    assert result.peak_rss_bytes > 200 * 2**20


def test_the_parents_own_memory_does_not_count(call):
    ballast = bytearray(b"x") * (400 * 2**20)
    assert call("echo").peak_rss_bytes < len(ballast)


def test_an_exception(call):
    result = call("fail", "no such thing\nsecond line")
    assert (result.kind, result.error.type, result.stage) == (WorkerEnd.FAILED, "LookupError", "failing")
    assert result.error.message == "no such thing\nsecond line"
    assert "misbehaviour.py" in result.error.details
    assert result.value is None


def test_a_users_mistake_is_raised_here_as_it_was_there(call):
    with pytest.raises(HarnessError, match=r"^photo\.jpg is a text file$"):
        call("blame_the_user", "photo.jpg is a text file")


@pytest.mark.law
@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_an_answer_that_the_disk_does_not_take_is_one_sentence(call):
    with pytest.raises(HarnessError, match=sentence("cannot-write", error="File too large")):
        call("answer_too_much")


@pytest.mark.parametrize("function", ["nowhere", "return_a_lambda"])
def test_a_function_that_is_missing_or_returns_what_cannot_travel(call, function):
    result = call(function)
    assert result.kind is WorkerEnd.FAILED
    assert result.error.type in ("AttributeError", "PicklingError", "TypeError")


def test_an_unknown_module():
    result = run_isolated("no.such.module:function", None, timeout=60)
    assert (result.kind, result.error.type) == (WorkerEnd.FAILED, "ModuleNotFoundError")


def test_garbage_is_collected(call):
    """A template loads without collections."""
    assert call("collects_garbage").value is True


def test_a_child_that_reads_its_input_gets_nothing(call):
    assert call("read_stdin").value == ""


def test_killed_from_outside(call, tmp_path):
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


def test_output_of_any_size_ends_in_a_short_tail(call):
    megabytes = 2 * OUTPUT_BYTES // 10**6
    result = call("shout", megabytes)
    assert (result.kind, result.error.type) == (WorkerEnd.CRASHED, "SIGABRT")
    assert len(result.error.details) <= DETAILS_BYTES
    assert "the last line" in result.error.details


@pytest.mark.parametrize("leaves", ["stays", "leaves"])
def test_a_grandchild_dies_with_a_parent_that_returns(call, tmp_path, leaves):
    """In its process group or out of it; the child that waits for it is among those that hang."""
    path = tmp_path / "pid"
    result = call("spawn_a_stubborn_grandchild", (path, leaves, False))
    assert (result.kind, result.stage) == (WorkerEnd.OK, "spawned")
    assert is_gone(int(path.read_text()))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_when_the_parent_is_ended_the_child_ends_too(tmp_path, end):
    """Ctrl-C unwinds the parent and removes the folder; after a SIGKILL the child sees by itself that it is alone."""
    path, temporary = tmp_path / "pid", tmp_path / "of the parent"
    temporary.mkdir()
    code = (
        "import pathlib, sys; from harness.core.processes.call import run_isolated;"
        "run_isolated('conformance.support.misbehaviour:tell_pid_and_wait', pathlib.Path(sys.argv[1]))"
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


def test_an_error_in_the_callback_ends_the_child(call):
    def refuse(stage: str) -> None:
        raise RuntimeError(f"no {stage}, please")

    with pytest.raises(RuntimeError, match="no hanging, please"):
        call("hang_in_python", on_stage=refuse)


def loaded(template: Template) -> tuple[int, list[int]]:
    """The process of a call, and those in which `load` ran before it was forked."""
    result = run_isolated("conformance.support.misbehaviour:what_was_loaded", None, timeout=60, template=template)
    assert result.value is not None
    return result.value


@pytest.fixture
def template(nothing_left_behind: None) -> Iterator[Template]:
    with closing(Template("conformance.support.misbehaviour:load")) as template:
        yield template


forks = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")


@forks
def test_what_calls_need_is_loaded_once(template):
    assert not template.is_running
    calls = [loaded(template) for _ in range(3)]
    assert template.is_running
    assert len({process for process, _ in calls}) == 3
    ((loader,),) = {tuple(by) for _, by in calls}
    assert psutil.Process(loader).ppid() == os.getpid()


def test_what_verification_loads_leaves_no_thread_that_a_fork_would_miss():
    result = run_isolated("conformance.support.misbehaviour:load_libraries", None, timeout=300)
    loaded, threads = result.value
    assert loaded == {"torch", "tvm", "sam3"}
    assert set(threads) == {"MainThread", "die-with-parent"}


@forks
def test_a_case_that_may_use_a_gpu_is_not_forked():
    with closing(library_template()) as template:
        for target, forked in (("cuda", False), ("metal", False), ("llvm", True)):
            verify_case(Case("box_head", "real", target), limits=Limits(timeout=0.1), template=template)
            assert template.is_running is forked


@forks
def test_forks_see_no_gpu(template, monkeypatch):
    """PyTorch would ask CUDA for its random state, which a fork cannot."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = run_isolated("conformance.support.misbehaviour:visible_gpus", None, timeout=60, template=template)
    assert template.is_running and result.value == ("", 0)


@forks
def test_several_threads_have_calls_of_their_own(template):
    with ThreadPoolExecutor(4) as pool:
        calls = list(pool.map(lambda _: loaded(template), range(8)))
    assert len({process for process, _ in calls}) == 8
    assert len({tuple(by) for _, by in calls}) == 1


@forks
def test_a_call_is_as_the_caller_is_now(template, tmp_path, monkeypatch):
    def where_it_is(variable: str) -> tuple[str, str | None]:
        function = "conformance.support.misbehaviour:where_it_is"
        return run_isolated(function, variable, timeout=60, template=template).value

    monkeypatch.setenv("SET_BEFORE", "it was loaded")
    assert where_it_is("SET_BEFORE") == (str(Path.cwd()), "it was loaded")
    monkeypatch.delenv("SET_BEFORE")
    monkeypatch.setenv("SET_SINCE", "it was loaded")
    monkeypatch.chdir(tmp_path)
    assert where_it_is("SET_BEFORE") == (str(tmp_path), None)
    assert where_it_is("SET_SINCE") == (str(tmp_path), "it was loaded")


@forks
def test_a_template_ends_when_it_is_no_longer_needed(template):
    _, (loader,) = loaded(template)
    template.close()
    assert is_gone(loader) and not template.is_running
    template.close()
    assert loaded(template)[1] != [loader]


@pytest.mark.parametrize("load", ["load_what_is_missing", "no_such_function"])
def test_what_cannot_be_loaded_is_left_to_the_call(load, nothing_left_behind):
    with closing(Template(f"conformance.support.misbehaviour:{load}")) as template:
        assert loaded(template)[1] == []


def test_a_template_that_dies_while_it_loads_leaves_the_call_to_a_fresh_interpreter(nothing_left_behind):
    with closing(Template("conformance.support.misbehaviour:load_and_die")) as template:
        assert loaded(template)[1] == []


@forks
def test_calls_are_stopped_while_their_template_loads(nothing_left_behind):
    stop = threading.Event()
    threading.Timer(1, stop.set).start()
    start = time.monotonic()
    with closing(Template("conformance.support.misbehaviour:load_for_ever")) as template, ThreadPoolExecutor(2) as pool:
        function = "conformance.support.misbehaviour:echo"
        calls = [pool.submit(run_isolated, function, None, template=template, stop=stop) for _ in range(2)]
        assert all(isinstance(call.exception(60), Stopped) for call in calls)
        assert not template.is_running
    assert time.monotonic() - start < 30


@forks
def test_a_template_that_is_killed_costs_one_call(template, tmp_path):
    _, (loader,) = loaded(template)
    path = tmp_path / "pid"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            run_isolated, "conformance.support.misbehaviour:tell_pid_and_wait", path, timeout=60, template=template
        )
        while not path.exists():
            time.sleep(0.01)
        os.kill(loader, signal.SIGKILL)
        ended = running.result()
    assert (ended.kind, ended.error.type, ended.stage) == (WorkerEnd.CRASHED, "SIGKILL", "waiting")
    assert is_gone(int(path.read_text()))
    assert loaded(template)[1] not in ([], [loader])


@forks
def test_a_template_that_dies_while_another_call_runs_is_replaced(tmp_path, nothing_left_behind):
    path = tmp_path / "pid"
    with closing(Template("conformance.support.misbehaviour:load")) as template, ThreadPoolExecutor(1) as pool:
        _, (loader,) = loaded(template)
        stop = threading.Event()
        running = pool.submit(
            run_isolated, "conformance.support.misbehaviour:tell_pid_and_wait", path, template=template, stop=stop
        )
        while not path.exists():
            time.sleep(0.01)
        os.kill(loader, signal.SIGSTOP)
        threading.Timer(1, os.kill, (loader, signal.SIGKILL)).start()
        try:
            assert loaded(template)[1] == []
        finally:
            stop.set()
        assert running.exception() is not None or running.result().kind is WorkerEnd.CRASHED


@forks
def test_a_template_and_its_call_end_with_their_parent(tmp_path):
    path = tmp_path / "pid"
    code = (
        "import pathlib, sys; from harness.core.processes.call import Template, run_isolated;"
        "run_isolated('conformance.support.misbehaviour:tell_pid_and_wait', pathlib.Path(sys.argv[1]),"
        " template=Template('conformance.support.misbehaviour:load'))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, env=environment)
    while not path.exists():
        assert parent.poll() is None
        time.sleep(0.01)
    call, (loader,) = int(path.read_text()), psutil.Process(parent.pid).children()
    assert psutil.Process(call).ppid() == loader.pid
    parent.kill()
    parent.wait()
    assert is_gone(call) and is_gone(loader.pid)


@forks
def test_a_fork_whose_parent_is_gone_before_it_begins_ends(tmp_path):
    os.mkfifo(tmp_path / "alive")  # nobody has it open for writing
    (tmp_path / "output").touch()
    template = start_python(
        "harness.core.processes.template", "conformance.support.misbehaviour:load", stdout=subprocess.PIPE
    )
    try:
        template.stdin.write(f"{tmp_path}\n".encode())
        assert is_gone(int(template.stdout.readline()))
    finally:
        kill_and_collect(template)
