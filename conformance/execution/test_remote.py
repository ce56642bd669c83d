"""Running elsewhere: real devices on this machine, of which some are killed, and a tunnel to one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm
from tvm import rpc

from conformance.support.inner_pytest import run_pytest
from conformance.support.product import product_module
from conformance.support.remotes import Served, Tunnel, device, end, free_port, tvm_server, until
from conformance.support.sentences import sentence
from harness.app.segment.job import FailedImage, Job, SegmentedImage, run
from harness.cli.main import app, exit_code
from harness.compiler.execution.remote.client import (
    DeviceLostError,
    DeviceSession,
    RemoteArtifact,
    RemoteError,
    RemoteExecutable,
    describe_remote,
)
from harness.compiler.execution.remote.device import own_versions
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import compile_module
from harness.compiler.targets.llvm import cpu_name
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Status
from harness.core.processors import Processors, Remote
from harness.core.settings import Settings
from harness.runtime import Prompt, Sam3
from harness.runtime.executable import Executable
from harness.verify.report.verification.document import build_report
from harness.verify.report.verification.pages import render_report
from harness.verify.runner import UNLIMITED, verify_case, verify_cases
from harness.verify.stages import run_case

CAT = Path(__file__).resolve().parents[2] / "fixtures" / "images" / "cat.png"
LOST, NEXT = Case("box_head", "real", "llvm"), Case("scoring_head", "real", "llvm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with device(folder / "store") as served:
        yield served


@pytest.fixture(scope="module")
def component(folder: Path) -> tuple[Path, list[np.ndarray]]:
    """x [6, 4], weight [4, 4], table [3] → x · weight, the table: the library, and its two parameters."""
    library = folder / "component.so"
    compile_module(product_module(2), TARGETS["llvm"], library)
    weight = np.random.default_rng(0).standard_normal((4, 4), np.float32)
    return library, [weight, np.arange(3, dtype=np.float32)]


def test_weights_are_sent_once_and_results_are_those_of_this_machine(
    served: Served, component: tuple[Path, list[np.ndarray]]
) -> None:
    library, parameters = component
    x = np.random.default_rng(1).standard_normal((6, 4), np.float32)
    expected = Executable(library, TARGETS["llvm"].device(), parameters).run([x])
    with closing(DeviceSession(served.remote)) as session:
        executable = RemoteExecutable(session, library, "llvm", parameters)
        for actual in (executable.run([x]), executable.run([x])):
            for a, b in zip(actual, expected, strict=True):
                np.testing.assert_array_equal(a, b)
        sent = library.stat().st_size + sum(array.nbytes for array in parameters)
        assert session.sent_bytes == sent
        # Other code with one other weight: the rest is there.
        RemoteExecutable(session, library, "llvm", [2 * parameters[0], parameters[1]])
        assert session.sent_bytes == sent + parameters[0].nbytes
    with closing(DeviceSession(served.remote)) as session:
        again = RemoteExecutable(session, library, "llvm", parameters).run([x])
        assert session.sent_bytes == 0
        np.testing.assert_array_equal(again[0], expected[0])


def test_what_arrives_otherwise_than_it_was_sent_or_does_not_run_is_an_error_and_no_end(
    served: Served, folder: Path, component: tuple[Path, list[np.ndarray]], tmp_path: Path
) -> None:
    library, parameters = component
    (half := tmp_path / "half.so").write_bytes(library.read_bytes()[:5000])
    right = hashlib.sha256(b"right").hexdigest()
    with closing(DeviceSession(served.remote)) as session:
        with pytest.raises(RemoteError, match=sentence("file-changed", digest=right)):
            session.ask("receive", right, 5, 0, b"wrong")
        assert not [path for path in (folder / "store").iterdir() if right in path.name]
        for offset, part in ((0, b"ri"), (2, b"ght")):
            assert session.ask("missing", json.dumps({right: 5})) == json.dumps([right])
            session.ask("receive", right, 5, offset, part)
        assert session.ask("missing", json.dumps({right: 5})) == "[]"
        (folder / "store" / right).write_bytes(b"rig")  # what was cut off since is sent again
        assert session.ask("missing", json.dumps({right: 5})) == json.dumps([right])
        with pytest.raises(RemoteError, match=sentence("truncated-library", library="half.so")):
            RemoteExecutable(session, half, "llvm", parameters)
        executable = RemoteExecutable(session, library, "llvm", parameters)
        with pytest.raises(RemoteError, match="shape"):
            executable.run([np.zeros((6, 5), np.float32)])
        assert executable.run([np.zeros((6, 4), np.float32)])[0].shape == (6, 4)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("missing", ["[" * 100_000]),
        ("missing", ['{"../name": 5}']),
        ("receive", ["../name", 5, 0, b"right"]),
        ("load", ["{}"]),
        ("load", ['{"target": "another", "files": {}, "manifest": ""}']),
        ("load", ['{"target": "llvm", "files": {"..": 3}}']),
        ("load", ['{"target": "llvm", "files": {}, "library": "component.so"}']),
    ],
)
def test_a_request_of_another_form_is_one_sentence(name: str, arguments: list[object], served: Served) -> None:
    with closing(DeviceSession(served.remote)) as session, pytest.raises(RemoteError) as raised:
        session.ask(name, *arguments)
    (line,) = str(raised.value).strip().splitlines()[-1:]
    assert re.search(sentence("bad-request"), line)


def test_inputs_of_another_form_are_one_sentence(served: Served, component: tuple[Path, list[np.ndarray]]) -> None:
    library, parameters = component
    with closing(DeviceSession(served.remote)) as session:
        function = RemoteExecutable(session, library, "llvm", parameters)._function
        for forms in ('[["float32", [6, 4]]', '[["float32", [7, 4]]]', '[["another", [6, 4]]]', "[]", "3"):
            with pytest.raises(RuntimeError, match=sentence("bad-request")):
                function("main", forms, bytes(96))


def test_parameters_of_another_form_are_one_sentence(served: Served, component: tuple[Path, list[np.ndarray]]) -> None:
    library, (weight, table) = component
    with closing(DeviceSession(served.remote)) as session, pytest.raises(RemoteError) as raised:
        RemoteExecutable(session, library, "llvm", [weight.reshape(2, 2, 4), table])
    (line,) = str(raised.value).strip().splitlines()[-1:]
    assert re.search(sentence("bad-request"), line)


def test_an_answer_of_another_form_is_one_sentence(tmp_path: Path) -> None:
    def prepare() -> None:
        tvm.register_global_func("sam3_tvm.describe", (tmp_path / "answer").read_text)

    server = rpc.Server("127.0.0.1", port := free_port(), port + 1, server_init_callback=prepare)
    try:
        for answer in ("{", "[" * 100_000, "3", '{"versions": 3}', json.dumps({"versions": own_versions()})):
            (tmp_path / "answer").write_text(answer)
            with pytest.raises(HarnessError, match=sentence("bad-answer")):
                describe_remote(Remote(f"127.0.0.1:{port}"))
    finally:
        server.terminate()


def test_a_device_says_what_it_is_and_what_it_lacks(served: Served) -> None:
    description = describe_remote(served.remote)
    assert "llvm" in description.hardware
    assert {*description.hardware, *description.problems} == set(TARGETS)
    assert description.processors.cpu == description.mcpu == cpu_name()
    assert Processors("x86-64-v3").with_defaults(description.processors).cpu == "x86-64-v3"
    assert description.problem("llvm", description.processors) is None
    for target, problem in description.problems.items():
        assert problem in str(description.problem(target, description.processors))
    older = dataclasses.replace(description, features=["sse2"])
    assert f"the device {description.name} lacks " in str(older.problem("llvm", description.processors))
    elsewhere = dataclasses.replace(description, architecture="another")
    assert dataclasses.replace(elsewhere, mcpu="generic").processors.cpu is None  # it means this architecture's here
    assert dataclasses.replace(elsewhere, mcpu="neoverse-n1").processors.cpu == "neoverse-n1"


def test_a_session_that_crashes_or_takes_too_long_is_lost_and_the_next_one_begins(
    served: Served, component: tuple[Path, list[np.ndarray]]
) -> None:
    library, parameters = component
    session = DeviceSession(served.remote)
    served.session().send_signal(signal.SIGSEGV)
    with pytest.raises(DeviceLostError, match=sentence("session-lost")):
        RemoteExecutable(session, library, "llvm", parameters)
    session = DeviceSession(dataclasses.replace(served.remote, seconds=1))
    process = served.session()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE)  # TVM's server collects it with the next one
    with pytest.raises(DeviceLostError, match=sentence("session-lost")):
        RemoteExecutable(session, library, "llvm", parameters)
    with pytest.raises(DeviceLostError, match=sentence("session-ended")):
        session.ask("describe")
    with closing(DeviceSession(served.remote)) as session:
        assert RemoteExecutable(session, library, "llvm", parameters).run([np.zeros((6, 4), np.float32)])


@pytest.mark.usefixtures("forked_processes")
def test_a_killed_server_is_the_outcome_of_one_case_and_verdicts_are_those_of_this_machine(tmp_path: Path) -> None:
    tunnel = Tunnel(port := free_port(), bytes_of_first=100_000)
    with device(tmp_path / "store", port=port) as one:

        def kill() -> None:
            tunnel.held.wait()
            end(one.process)

        threading.Thread(target=kill, daemon=True).start()
        settings = Settings(remote=tunnel.remote)
        results = verify_cases([LOST, NEXT], settings, UNLIMITED)
        lost = next(results)
    with device(tmp_path / "store", port=port):
        (passed,) = results
        again = verify_case(NEXT, settings)
    assert lost.outcome.status is Status.CRASHED and lost.expected is False
    assert lost.outcome.error is not None and lost.outcome.error.type == "DeviceLost"
    assert re.search(sentence("session-lost"), lost.outcome.error.message)
    assert passed.expected and passed.outcome.verdicts == run_case(NEXT, Settings()).verdicts == again.outcome.verdicts
    first, second = passed.outcome.device, again.outcome.device
    assert first is not None and second is not None
    assert first.sent_bytes > passed.outcome.sizes["library"] >= second.sent_bytes  # of code that is compiled anew
    report = json.loads(json.dumps(build_report([passed], {}, {})))
    assert report["cases"][0]["device"]["cpu"] == first.cpu
    assert f"at {tunnel.remote}; " in render_report(report)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_server_that_is_stopped_ends_its_session_and_leaves_nothing(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    with device(tmp_path / "store", TMPDIR=str(temporary)) as served:
        session = DeviceSession(served.remote)
        family = psutil.Process(served.process.pid).children(recursive=True)
        assert len(family) == 2 and list(temporary.iterdir())
        served.process.send_signal(number)
        assert served.process.wait(timeout=120) == code
        with pytest.raises(DeviceLostError, match=sentence("session-lost")):
            session.ask("describe")
    until(lambda: not any(member.is_running() for member in family))
    assert list(temporary.iterdir()) == []
    assert "Stopped" in served.log.read_text() and "Traceback" not in served.log.read_text()


def test_whatever_keeps_a_command_from_a_device_is_one_sentence(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert exit_code(lambda: app(arguments, standalone_mode=False)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    verify = ("verify", "--component", "box_head", "--report", str(tmp_path / "report"), "--remote")
    nobody = f"127.0.0.1:{free_port()}"
    unanswered = sentence("no-device", remote=nobody, error=f"Connect to {nobody} failed")
    assert re.search(unanswered, refusal(*verify, nobody))
    target = next(iter(describe_remote(served.remote).problems))
    assert f"cannot run {target}: " in refusal(*verify, served.remote.address, "--target", target)
    with tvm_server(tmp_path / "log") as plain:
        assert re.search(sentence("plain-rpc-server", remote=plain), refusal(*verify, plain.address))
    with device(tmp_path / "store", tvm_version="0.26.0") as older:
        other = sentence("other-versions", device_text="apache-tvm 0.26.0")
        assert re.search(other, refusal(*verify, older.remote.address))
    exposed = sentence("not-loopback", host="0.0.0.0", tunnel="ssh -N -L 9090:127.0.0.1:9090")
    assert re.search(exposed, refusal("serve-device", "--host", "0.0.0.0"))
    temporary = os.environ.get("TMPDIR")
    taken = refusal("serve-device", "--port", str(served.port), "--store", str(tmp_path / "other"))
    assert os.environ.get("TMPDIR") == temporary
    reason = f"cannot bind to any port in [{served.port}, {served.port + 1})"
    assert re.search(sentence("server-not-started", reason=reason), taken)


def test_a_device_that_is_busy_is_waited_for_and_then_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.compiler.execution.remote.client.BUSY_SECONDS", 2.0)
    with closing(DeviceSession(served.remote)), pytest.raises(DeviceLostError, match=sentence("device-busy")):
        describe_remote(served.remote)
    monkeypatch.undo()
    assert describe_remote(served.remote)


@pytest.mark.wide
def test_a_session_whose_client_is_gone_makes_room_for_the_next_one(served: Served) -> None:
    gone = DeviceSession(served.remote)
    gone.rpc = None  # as where its process has ended
    with closing(DeviceSession(dataclasses.replace(served.remote, seconds=30))) as session:
        assert session.ask("describe")


def test_segmenting_on_a_device_finds_the_same(served: Served, shallow_artifact: Path, tmp_path: Path) -> None:
    jobs = [Job([CAT], [Prompt("a cat")], tmp_path / name, 0.0) for name in ("here", "there", "lost")]
    (here,) = run(Sam3.load(shallow_artifact), jobs[0])
    with closing(DeviceSession(served.remote)) as session:
        model = Sam3(RemoteArtifact(session, shallow_artifact))  # type: ignore[arg-type]
        assert session.sent_bytes > 1e8
        (there,) = run(model, jobs[1])
        served.session().kill()
        (lost,) = run(model, jobs[2])
    assert isinstance(here, SegmentedImage) and isinstance(there, SegmentedImage)
    assert there.annotations == here.annotations
    assert isinstance(lost, FailedImage) and re.search(sentence("session-lost"), lost.reason)
    with closing(DeviceSession(served.remote)) as session:
        RemoteArtifact(session, shallow_artifact)
        assert session.sent_bytes == 0


def test_pytest_has_the_option(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    suite = ("--collect-only", "conformance/verify/test_components.py", "--component", "box_head", "-m", "llvm")
    assert run_pytest(*suite, "--remote", f"127.0.0.1:{free_port()}") == pytest.ExitCode.USAGE_ERROR
    assert re.search("ERROR: " + sentence("no-device"), capsys.readouterr().err)
    assert run_pytest("-v", *suite, "--remote", served.remote.address) == pytest.ExitCode.OK
    assert f"cases run on {served.remote}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:1.5", "host:²"]
)
def test_what_is_no_address_is_one_sentence(address: str) -> None:
    with pytest.raises(HarnessError, match=sentence("bad-address")):
        Remote(address)


def test_addresses() -> None:
    remote = Remote("[::1]:9090")
    assert (remote.host, remote.port, remote.flags) == ("::1", 9090, ("--remote", "[::1]:9090"))
