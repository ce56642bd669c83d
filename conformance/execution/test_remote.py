"""Running elsewhere: a real tracker and real servers on this machine, of which some are killed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from conformance.support.product import product_module
from conformance.support.remotes import KEY, Served, device, end, free_port, new_remote, tracker, tvm_server, until
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Stage, Status
from harness.core.processors import Processors
from harness.core.remote import Remote
from harness.core.settings import Settings
from harness.execution.executors import RemoteExecutor
from harness.execution.remote.client import DeviceSession, RemoteExecutable, registered
from harness.execution.remote.errors import DeviceLostError, RemoteError
from harness.execution.remote.model import RemoteModel
from harness.execution.remote.tracker import Tracker
from harness.report import Result
from harness.report.verification.document import build_report
from harness.report.verification.markdown import render_report
from harness.runtime import Prompt, Sam3
from harness.runtime.executable import Executable
from harness.runtime.loading import LoadError
from harness.segment import FailedImage, Job, SegmentedImage, run
from harness.targets import TARGETS
from harness.targets.compiling import compile_module
from harness.targets.llvm import cpu_name
from harness.verify.runner import UNLIMITED, verify_cases
from harness.verify.stages import run_case

CAT = Path(__file__).resolve().parents[2] / "fixtures" / "images" / "cat.png"
LOST, NEXT = Case("box_head", "real", "llvm"), Case("scoring_head", "real", "llvm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with tracker() as address:
        yield address


@pytest.fixture(scope="module")
def remote(address: str, folder: Path) -> Remote:
    return new_remote(address, folder)


@pytest.fixture(scope="module", autouse=True)
def served(remote: Remote, folder: Path) -> Iterator[Served]:
    with device(remote, folder / "store") as served:
        yield served


@pytest.fixture(scope="module")
def component(folder: Path) -> tuple[Path, list[np.ndarray]]:
    """x [6, 4], weight [4, 4], table [3] → x · weight, the table: the library, and its two parameters."""
    library = folder / "component.so"
    compile_module(product_module(2), TARGETS["llvm"], library)
    weight = np.random.default_rng(0).standard_normal((4, 4), np.float32)
    return library, [weight, np.arange(3, dtype=np.float32)]


def test_weights_are_sent_once_and_results_are_those_of_this_machine(
    remote: Remote, component: tuple[Path, list[np.ndarray]]
) -> None:
    library, parameters = component
    x = np.random.default_rng(1).standard_normal((6, 4), np.float32)
    expected = Executable(library, TARGETS["llvm"].device(), parameters).run([x])
    seconds: list[float] = []
    with DeviceSession(remote) as session:
        executable = RemoteExecutable(session, library, "llvm", parameters, seconds.append)
        for actual in (executable.run([x]), executable.run([x])):
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(a, b)
        sent = library.stat().st_size + sum(array.nbytes for array in parameters)
        assert session.sent_bytes == sent
        # Other code with one other weight: the rest is there.
        RemoteExecutable(session, library, "llvm", [2 * parameters[0], parameters[1]])
        assert session.sent_bytes == sent + parameters[0].nbytes
    with DeviceSession(remote) as session:
        again = RemoteExecutable(session, library, "llvm", parameters).run([x])
        assert session.sent_bytes == 0
        np.testing.assert_array_equal(again[0], expected[0])
    assert len(seconds) == 2
    assert all(0 < value < 60 for value in seconds)


def test_what_goes_wrong_with_the_code_is_told_as_here(
    remote: Remote, component: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    library, parameters = component
    half = tmp_path / "half.so"
    half.write_bytes(library.read_bytes()[:5000])
    with DeviceSession(remote) as session:
        with pytest.raises(LoadError, match=r"half\.so is cut off: compile it again"):
            RemoteExecutable(session, half, "llvm", parameters)
        executable = RemoteExecutable(session, library, "llvm", parameters)
        with pytest.raises(RemoteError) as caught:
            executable.run([np.zeros((6, 5), np.float32)])
        assert "Traceback" in caught.value.details
        # An error is no end of the session.
        assert executable.run([np.zeros((6, 4), np.float32)])[0].shape == (6, 4)


def test_a_device_says_what_it_is(remote: Remote) -> None:
    description = registered(remote)
    assert "llvm" in description.hardware
    assert {*description.hardware, *description.problems} == set(TARGETS)
    assert description.processors.cpu == description.mcpu == cpu_name()
    assert Processors("x86-64-v3").otherwise(description.processors).cpu == "x86-64-v3"
    elsewhere = dataclasses.replace(description, architecture="another")
    assert dataclasses.replace(elsewhere, mcpu="generic").processors.cpu is None  # it means this architecture's here
    assert dataclasses.replace(elsewhere, mcpu="neoverse-n1").processors.cpu == "neoverse-n1"
    executor = RemoteExecutor(remote)
    assert executor.run_problem("llvm") is None
    for target in description.problems:
        problem = executor.run_problem(target)
        assert problem is not None
        assert description.name in problem
        assert description.problems[target] in problem


def test_a_session_that_crashes_is_told_and_replaced(
    remote: Remote, served: Served, component: tuple[Path, list[np.ndarray]]
) -> None:
    library, parameters = component
    session = DeviceSession(remote)
    process = served.session()
    process.suspend()  # such that the call still waits when the process dies
    caught: list[Exception] = []

    def call() -> None:
        try:
            RemoteExecutable(session, library, "llvm", parameters)
        except Exception as error:
            caught.append(error)

    waiting = threading.Thread(target=call)
    waiting.start()
    process.kill()
    waiting.join(120)
    (error,) = caught
    assert isinstance(error, DeviceLostError)
    assert "died of SIGKILL" in str(error)
    assert session.lost
    with DeviceSession(remote) as session:
        assert RemoteExecutable(session, library, "llvm", parameters).run([np.zeros((6, 4), np.float32)])


def test_verdicts_are_those_of_this_machine_and_a_killed_device_is_an_outcome(address: str, tmp_path: Path) -> None:
    remote = new_remote(address, tmp_path, "killed")
    with device(remote, tmp_path / "one") as one:
        one.session().suspend()  # the case waits for it until it is killed

        def on_stage(case: Case, stage: str) -> None:
            if case == LOST and stage == Stage.LOAD:
                end(one.process)

        results = verify_cases([LOST, NEXT], Settings(remote=remote), UNLIMITED, on_stage)
        lost = next(results)
        with device(remote, tmp_path / "two", "--host", "0.0.0.0") as two:
            (passed,) = results
            assert f"Listening at 0.0.0.0, port {two.port}: OTHER MACHINES REACH IT." in two.printed()
            ctrl_c_ends_it_with_its_session(two, remote)
    assert lost.outcome.status is Status.CRASHED
    assert lost.outcome.stage is Stage.LOAD
    assert lost.outcome.error is not None
    assert lost.outcome.error.type == "DeviceLost"
    assert f"no device is registered as {remote}" in lost.outcome.error.message
    assert lost.expected is False
    assert passed.outcome.verdicts == run_case(NEXT, Settings()).verdicts
    assert passed.expected
    told(passed, remote)


def ctrl_c_ends_it_with_its_session(served: Served, remote: Remote) -> None:
    with DeviceSession(remote) as session:
        family = [psutil.Process(served.process.pid), served.session()]
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=120) == 0
        with pytest.raises(DeviceLostError, match="ended before its work was done"):
            session.put(np.zeros(1))
    until(lambda: not any(member.is_running() for member in family))
    output = served.printed()
    assert "llvm: " in output
    assert "A session of " in output
    assert output.splitlines()[-1].startswith("Stopped")
    with pytest.raises(DeviceLostError, match=f"no device is registered as {remote}"):
        DeviceSession(remote, gone_seconds=0)


def told(result: Result, remote: Remote) -> None:
    """The report says where a case ran."""
    ran = result.outcome.device
    assert ran is not None
    assert (ran.address, ran.key, ran.target) == (remote.address, remote.key, "llvm")
    assert ran.sent_bytes > 0
    assert 0 < ran.seconds < 60
    report = json.loads(json.dumps(build_report([result], {}, {})))
    assert report["cases"][0]["device"]["cpu"] == ran.cpu
    page = render_report(report)
    assert f"Ran on {ran.name} ({ran.cpu}" in page


@pytest.mark.wide
def test_segmenting_goes_on_after_a_session_that_crashed(
    remote: Remote, served: Served, shallow_artifact: Path, tmp_path: Path
) -> None:
    images = [tmp_path / "a.png", tmp_path / "b.png"]
    for image in images:
        shutil.copy(CAT, image)
    job = Job(images, [Prompt("a cat")], tmp_path / "out", 0.0)
    (here,) = run(Sam3.load(shallow_artifact), dataclasses.replace(job, images=images[1:], out=tmp_path / "here"))
    model = RemoteModel(remote, shallow_artifact)
    assert model.sent_bytes > 1e8
    served.session().kill()
    first, second = run(model, job)
    assert model.sent_bytes == 0
    model.close()
    assert isinstance(first, FailedImage)
    assert "ended before its work was done" in first.reason
    assert isinstance(here, SegmentedImage)
    assert isinstance(second, SegmentedImage)
    assert second.annotations == here.annotations


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        timeout=600,
        check=False,
    )


def one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "rror: " in line.lower()]
    for word in words:
        assert word in line


def test_a_wrong_key_or_port_is_one_sentence(remote: Remote, shallow_artifact: Path, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    verify = ("-m", "harness", "verify", "--component", "box_head", "--report", str(tmp_path / "report"))
    wrong = dataclasses.replace(remote, key="wrong").flags
    done = command(*verify, *wrong)
    one_sentence(done, "no server with key 'wrong'", f"the keys there are {KEY}", "sam3-tvm serve-device")
    done = command(*verify, *dataclasses.replace(remote, address=nobody).flags)
    one_sentence(done, f"no RPC tracker answers at {nobody}")
    segment = ("-m", "harness", "segment", str(CAT), "--text", "cat", "--model", str(shallow_artifact))
    done = command(*segment, "--out", str(tmp_path / "out"), *wrong)
    one_sentence(done, "no server with key 'wrong'")
    assert not (tmp_path / "out").exists()
    serve = ("-m", "harness", "serve-device", "--store", str(tmp_path), "--secret-file", str(remote.secret_file))
    done = command(*serve, "--tracker", nobody, "--key", KEY)
    one_sentence(done, f"no RPC tracker answers at {nobody}")
    done = command("-m", "harness", "verify", "--key", KEY)
    one_sentence(done, "says nothing without --remote")


def test_pytest_has_the_options(remote: Remote) -> None:
    suite = ("-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "conformance/verify/test_components.py")
    nobody = dataclasses.replace(remote, address=f"127.0.0.1:{free_port()}")
    done = command(*suite, "--component", "box_head", *nobody.flags)
    assert done.returncode == 4
    assert "ERROR: no RPC tracker answers" in done.stderr
    done = command(*suite[:-2], suite[-1], *remote.flags, "-m", "llvm")  # without -q, which hides the header
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"cases run on {remote}" in done.stdout


def test_tvms_own_server_is_refused_with_a_sentence(address: str, tmp_path: Path) -> None:
    remote = new_remote(address, tmp_path, "plain")
    with tvm_server(address, remote.key):
        until(lambda: Tracker(address, remote.key).workers() == 1)
        with pytest.raises(HarnessError, match=r"is not one of this version's `sam3-tvm serve-device`"):
            registered(remote)
