"""The processes under a process, with real ones: children, grandchildren, and those that are gone."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from harness.core.processes import call as searching
from harness.core.processes.call import descendants, kill_and_collect

CODE = """
import subprocess, sys, threading
child = [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '60'])"]
for _ in range(2):
    threading.Thread(target=subprocess.run, args=(child,)).start()
"""


def names(pid: int) -> list[str]:
    return sorted(process.name() for process in descendants(pid))


@pytest.mark.parametrize("listed", [pytest.param(True, id="listed"), pytest.param(False, id="psutil")])
def test_children_of_every_thread_and_their_children(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system has no lists of children."""
    if listed and not searching.LISTED:
        pytest.skip("this system does not list the children of a thread")
    monkeypatch.setattr(searching, "LISTED", listed)
    with subprocess.Popen([sys.executable, "-c", CODE], start_new_session=True) as parent:
        try:
            while names(parent.pid).count("sleep") < 2:
                assert parent.poll() is None
            found = {process.pid for process in descendants(parent.pid)}
            assert found == {process.pid for process in psutil.Process(parent.pid).children(recursive=True)}
            assert len(found) == 4
        finally:
            for process in [*descendants(parent.pid), parent]:
                process.kill()
    assert descendants(parent.pid) == []


def test_of_a_process_that_was_collected_the_rest_of_its_group_ends_and_nobody_who_has_its_number_now() -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        left = psutil.Process(int(leader.stdout.readline()))
        assert leader.wait() == 0 and left.is_running()
        assert kill_and_collect(leader) == 0
        left.wait(10)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        leader.pid = other.pid
        assert kill_and_collect(leader) == 0
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        other.kill()
