"""`sam3-tvm segment --ray` as a user meets it: the results of one process, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import psutil
import pytest
from PIL import Image

from conformance.support.sentences import sentence
from conformance.support.shards import serve, write_parquet, write_tar
from harness import __version__
from harness.app.results.journal import JOURNAL, results_folder
from harness.core.cluster import connect
from harness.core.errors import HarnessError

ROOT = Path(__file__).resolve().parents[2]
CAT = ROOT / "fixtures" / "images" / "cat.png"
POISON, LAST = "poison.png", "3.png"
MISBEHAVES = """
import os, sys, time
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith({!r}):
        {}
sys.addaudithook(hook)
"""
ENDS_WORKERS = MISBEHAVES.format(POISON, "os._exit(9)")
"""Ends a process that opens the picture, as one does that needs too much memory."""
HOLDS_WORKERS = MISBEHAVES.format(LAST, "time.sleep(600)")
"""Holds a process that opens the picture."""


def command(photographs: Path, out: Path, model: Path, *arguments: str) -> list[str]:
    first = [sys.executable, "-m", "harness", "segment", str(photographs), "--text", "cat", "--text", "dog"]
    return [*first, "--threshold", "0.78", "--model", str(model), "--out", str(out), *arguments]


TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""The variables of a cluster's users; `ray start` wants a token."""


def environment(*folders: Path) -> dict[str, str]:
    paths = [*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(paths)}


def run(arguments: list[str], *folders: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, capture_output=True, text=True, env=environment(*folders), timeout=600, check=False
    )


def results(out: Path) -> dict[str, bytes]:
    """All files but the journal, which has the seconds and the order in which images were done."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != JOURNAL]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def done(out: Path) -> list[str]:
    """The images that the journal lists, each as often as it was done."""
    journal = out / JOURNAL
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else []
    entries = [json.loads(line.partition(" ")[2]) for line in lines if line.endswith("}")]
    return [entry["name"] for entry in entries if "key" in entry]


def wait(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def start(arguments: list[str], is_leader: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=is_leader,
    )


def processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Ray's processes that a command started."""
    return psutil.Process(process.pid).children(recursive=True)


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in processes(process) if "ray::Segmenter" in " ".join(child.cmdline())]


def left(started: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run some seconds later."""
    return psutil.wait_procs(started, timeout=seconds)[1]


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    folder = tmp_path / "photographs"
    folder.mkdir()
    with Image.open(CAT) as image:
        for number in range(8):
            image.resize((90 + 20 * number, 60 + 10 * number)).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--ray", "--remote", "localhost:1"), sentence("ray-alone", flag="--remote")),
        (("--ray-address", "localhost:1"), sentence("address-without-ray")),
    ],
)
def test_options_that_contradict_each_other(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    finished = run(command(CAT, tmp_path / "out", tmp_path, *arguments))
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1)
    assert re.search(expected, finished.stderr)


@pytest.mark.law
@pytest.mark.parametrize("user", [{}, {"RAY_USAGE_STATS_ENABLED": "1"}], ids=["default", "chosen"])
@pytest.mark.parametrize("is_cluster", [False, True], ids=["alone", "cluster"])
def test_ray_sends_nothing_to_its_makers_unless_the_user_says_so(
    user: dict[str, str], is_cluster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[object, dict[str, str]]] = []

    def init(address: str, **_: object) -> SimpleNamespace:
        started.append((address, dict(os.environ)))
        return SimpleNamespace(dashboard_url="")

    ray = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)
    vars(ray).update(init=init, is_initialized=lambda: False, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with mock.patch.dict(os.environ, others | user, clear=True), socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname()) if is_cluster else None
        with connect(address) as dashboard:
            assert dashboard is None
    ((place, variables),) = started
    assert place == (address or "local")
    assert variables["RAY_USAGE_STATS_ENABLED"] == user.get("RAY_USAGE_STATS_ENABLED", "0")
    assert ("RAY_NUM_REDIS_GET_RETRIES" in variables) is is_cluster


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "auto", "head"])
def test_addresses_that_are_none(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(HarnessError, match=sentence("bad-ray-address", address=address)), connect(address):
        pass


def test_ray_is_not_installed(tmp_path: Path) -> None:
    program = "import sys; sys.modules['ray'] = None; from harness.cli.main import main; main()"
    arguments = command(CAT, tmp_path / "out", tmp_path, "--ray")
    finished = run([sys.executable, "-c", program, *arguments[3:]])
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1)
    assert re.search(sentence("no-ray"), finished.stderr)


def test_nodes_that_cannot_take_part(tiny_artifact: Path, tmp_path: Path) -> None:
    """Each in a process, because the node's has no PyTorch any more."""
    program = "import sys; from harness.app.segment.workers import check_node; print(check_node(*sys.argv[1:]))"
    for folder, version, expected in (
        (tiny_artifact, "0.0", sentence("node-has-other-version", version=__version__, expected="0.0")),
        (tmp_path / "none", __version__, sentence("no-model-folder", folder=tmp_path / "none")),
        (tiny_artifact, __version__, sentence("node-has-other-folder", folder=tiny_artifact)),
    ):
        finished = run([sys.executable, "-c", program, str(folder), "digest", version])
        assert re.search(expected, finished.stdout), finished.stderr


def test_no_cluster_and_a_folder_that_is_being_written(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "out"
    finished = run(command(photographs, out, tiny_artifact, "--ray", "--ray-address", "127.0.0.1:9"))
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1), finished.stderr
    assert re.search(sentence("no-ray-cluster", place="127.0.0.1:9"), finished.stderr)
    assert not out.exists()
    with results_folder(out):
        finished = run(command(photographs, out, tiny_artifact, "--ray"))
    assert (finished.returncode, finished.stderr.count("\n")) == (2, 1), finished.stderr
    assert re.search(sentence("folder-in-use", folder=out), finished.stderr)


def test_the_results_are_those_of_one_process(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    """An image that cannot be read, and one that ends each of its workers, are listed; the others are done."""
    pytest.importorskip("ray")
    (photographs / "broken.png").write_bytes(CAT.read_bytes()[:9000])
    alone = run(command(photographs, tmp_path / "alone", tiny_artifact, "--threads", "1"))
    assert alone.returncode == 1, alone.stderr
    (photographs / POISON).write_bytes(CAT.read_bytes())
    (tmp_path / "sitecustomize.py").write_text(ENDS_WORKERS)
    finished = run(command(photographs, tmp_path / "ray", tiny_artifact, "--ray"), tmp_path)
    assert finished.returncode == 1, finished.stderr
    broken, poison = finished.stderr.splitlines()
    assert [broken] == alone.stderr.splitlines()
    assert poison.startswith(f"error: {photographs / POISON}: its worker was lost 3 times")
    assert results(tmp_path / "ray") == results(tmp_path / "alone")
    assert len(results(tmp_path / "ray")) > 8


def test_what_is_killed_or_interrupted_goes_on(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    """A worker, the command at Ctrl-C and the command by SIGKILL; nothing that was done is done again."""
    pytest.importorskip("ray")
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert run(command(photographs, alone, tiny_artifact, "--threads", "1")).returncode == 0
    arguments = command(photographs, out, tiny_artifact, "--ray")
    with start(arguments) as process:
        wait(process, lambda: done(out))
        for worker in workers(process):
            worker.kill()
        first = len(done(out))
        wait(process, lambda: len(done(out)) > first)
        started = processes(process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=100)
    assert (process.returncode, stderr.count("\n")) == (130, 1), stderr
    assert not left(started, 10)
    assert len(json.loads((out / "annotations.json").read_text())["images"]) == len(done(out))
    first = len(done(out))
    with start(arguments) as process:
        wait(process, lambda: len(done(out)) > first)
        started = processes(process)
        process.kill()
    assert not left(started, 120)  # agents of Ray look for it every few seconds
    before = done(out)
    times = {name: (out / f"{name}_overlay.png").stat().st_mtime_ns for name in before}
    finished = run(arguments)
    assert finished.returncode == 0, finished.stderr
    assert f"{len(before)} images had been done by an earlier run" in finished.stdout
    assert {name: (out / f"{name}_overlay.png").stat().st_mtime_ns for name in before} == times
    assert sorted(done(out)) == sorted(path.stem for path in photographs.iterdir())
    assert results(out) == results(alone)


def test_shards_and_addresses(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    """Their images are tried again, too, when all workers are killed."""
    pytest.importorskip("ray")
    content = [path.read_bytes() for path in sorted(photographs.iterdir())]
    tar = write_tar(tmp_path / "0.tar", [(f"{number}.png", content[number]) for number in (0, 1, 1)])
    parquet = write_parquet(tmp_path / "1.parquet", {"image": content[3:6]})
    alone, out = tmp_path / "alone", tmp_path / "out"
    with serve(photographs) as address:
        (tmp_path / "list.txt").write_text(f"{address}/6.png\n{address}/7.png\n{parquet.name}\n")
        given = str(tmp_path / "list.txt")
        assert run(command(tar, alone, tiny_artifact, given, "--threads", "1")).returncode == 0
        with start(command(tar, out, tiny_artifact, given, "--ray")) as process:
            wait(process, lambda: done(out))
            for worker in workers(process):
                worker.kill()
            _, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert sorted(done(out)) == ["0_0", "0_1", "0_1_2", "1_0", "1_1", "1_2", "6", "7"]
    assert results(out) == results(alone)


def test_images_of_a_shard_wait_for_room(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store has room for one of them, and the disk counts as full."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(80 << 20))
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")
    shard = write_tar(tmp_path / "0.tar", [(f"{number}.png", bytes(50 << 20)) for number in range(4)])
    finished = run(command(shard, tmp_path / "out", tiny_artifact, "--ray"))
    assert finished.returncode == 1
    assert len(re.findall(sentence("unknown-format"), finished.stderr)) == finished.stderr.count("\n") == 4


def test_a_signal_to_all_processes_while_ray_starts(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    """As from `timeout`, or from a terminal that is closed."""
    pytest.importorskip("ray")
    with start(command(photographs, tmp_path / "out", tiny_artifact, "--ray"), is_leader=True) as process:
        wait(process, lambda: processes(process))
        started = processes(process)
        os.killpg(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=100)
    assert (process.returncode, stderr.count("\n")) == (143, 1), stderr
    assert not left(started, 10)


def test_a_cluster(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    """A command without the cluster's token, one whose workers have no room, and one that works."""
    pytest.importorskip("ray")
    arguments = command(photographs, tmp_path / "out", tiny_artifact, "--ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    head += ["--include-dashboard=false", f"--port={port}", "--num-cpus=1"]
    for photograph in sorted(photographs.iterdir())[2:]:
        photograph.unlink()
    arguments += ["--ray-address", f"127.0.0.1:{port}"]
    with tempfile.TemporaryDirectory() as short, pytest.MonkeyPatch.context() as patch:  # sockets need a short path
        for name, value in TOKEN.items():
            patch.setenv(name, value)
        process = start([*head, f"--temp-dir={short}"])
        try:
            wait(process, (Path(short) / "session_latest" / "sockets" / "raylet").exists)
            patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
            stranger = run(arguments)
            patch.setenv("RAY_AUTH_TOKEN", TOKEN["RAY_AUTH_TOKEN"])
            refused = run([*arguments, "--threads", "2"])
            finished = run(arguments)
        finally:
            started = processes(process)
            process.terminate()
            for child in left(started, 20):
                child.kill()
            process.communicate()
    assert (stranger.returncode, stranger.stderr.count("\n")) == (2, 1), stranger.stderr
    assert "wants its token" in stranger.stderr
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert re.search(sentence("no-node-for-worker", threads=2), refused.stderr)
    assert finished.returncode == 0, finished.stderr
    assert len(done(tmp_path / "out")) == 2


def test_nodes_that_are_lost(tiny_artifact: Path, photographs: Path, tmp_path: Path) -> None:
    """A node that is killed while it segments, the last one, one of another version, and the head."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    for photograph in sorted(photographs.iterdir())[4:]:
        photograph.unlink()
    alone, out, other = (tmp_path / name for name in ("alone", "out", "other"))
    assert run(command(photographs, alone, tiny_artifact, "--threads", "1")).returncode == 0
    (tmp_path / "sitecustomize.py").write_text("import harness; harness.__version__ = '0.0'")
    with tempfile.TemporaryDirectory() as short, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": short})
        address = ("--ray", "--ray-address", cluster.address)
        try:
            killed, last = cluster.add_node(), cluster.add_node()
            with start(command(photographs, out, tiny_artifact, *address)) as process:
                wait(process, lambda: done(out))
                cluster.remove_node(killed, allow_graceful=False)
                stdout, stderr = process.communicate(timeout=300)
            assert (process.returncode, stderr) == (0, "") and "raylet" not in stdout
            with start(command(photographs, other, tiny_artifact, *address)) as process:
                wait(process, lambda: done(other))
                cluster.remove_node(last, allow_graceful=False)
                _, stderr = process.communicate(timeout=100)
            assert process.returncode == 2 and re.fullmatch(f"error: {sentence('no-node-left')}\n", stderr)
            stranger = cluster.add_node(env_vars={"PYTHONPATH": environment(tmp_path)["PYTHONPATH"]})
            refused = run(command(photographs, other, tiny_artifact, *address))
            assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
            assert re.search(sentence("node-has-other-version", version="0.0", expected=__version__), refused.stderr)
            cluster.remove_node(stranger)
            (tmp_path / "sitecustomize.py").write_text(HOLDS_WORKERS)  # or it would end before the head is missed
            cluster.add_node(env_vars={"PYTHONPATH": environment(tmp_path)["PYTHONPATH"]})
            with start(command(photographs, other, tiny_artifact, *address)) as process:
                wait(process, lambda: len(done(other)) == 3)
                cluster.head_node.kill_gcs_server()
                _, stderr = process.communicate(timeout=100)
            assert process.returncode == 2 and re.fullmatch(f"error: {sentence('head-lost')}\n", stderr), stderr
        finally:
            cluster.shutdown()
    assert run(command(photographs, other, tiny_artifact, "--ray")).returncode == 0
    assert results(out) == results(other) == results(alone)
