"""Files and folders are whole or absent, whoever writes them at a time and however it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from conformance.support.sentences import sentence
from harness.core.errors import HarnessError
from harness.core.files import (
    append_bytes,
    check_writable,
    make_folder,
    prune_files,
    remove_temporary_files,
    replace_folder,
    scratch_folder,
    write_bytes,
    write_file,
    write_files,
    write_json,
    write_text,
)

# A limit on file size fails a write in the middle, as a full disk does.
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from harness.core.files import append_bytes, write_bytes, write_files
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
"""
MARK = "mark"


def model(folder: Path):
    """A folder that may be replaced where it holds a mark."""
    return replace_folder(folder, lambda there: (there / MARK).is_file(), "a compiled model")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_on_full_disk(action: str, folder: Path) -> str:
    script = FULL_DISK + action
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1]


def test_what_is_written_is_there_and_nothing_else(tmp_path: Path) -> None:
    write_bytes(tmp_path / "bytes", b"\0\n", durable=True)
    write_text(tmp_path / "text", "ключ\n")
    write_json(tmp_path / "json", {"b": ["ключ", "\ud800"], "a": 1}, sort_keys=True)
    write_files(tmp_path / "new", {"page": b"page", "below/picture": b"picture"})
    assert (tmp_path / "bytes").read_bytes() == b"\0\n"
    assert (tmp_path / "text").read_text(encoding="utf-8") == "ключ\n"
    assert json.loads((tmp_path / "json").read_text(encoding="utf-8")) == {"a": 1, "b": ["ключ", "\ud800"]}
    assert (tmp_path / "new" / "below" / "picture").read_bytes() == b"picture"
    assert (names(tmp_path), names(tmp_path / "new")) == (["bytes", "json", "new", "text"], ["below", "page"])


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_what_is_added_to_a_file_is_added_as_a_whole(tmp_path: Path) -> None:
    for part in (b"one ", b"two "):
        append_bytes(tmp_path / "file", part)
    refused = sentence("cannot-write", path=tmp_path / "file", error="File too large")
    assert re.search(refused, run_on_full_disk("append_bytes(Path(sys.argv[1]) / 'file', b'x' * 5000)", tmp_path))
    assert (tmp_path / "file").read_bytes() == b"one two "
    with pytest.raises(HarnessError, match=sentence("cannot-write")):
        append_bytes(tmp_path / "absent" / "file", b"three")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(tmp_path: Path) -> None:
    write_bytes(tmp_path / "file", b"before")
    told = run_on_full_disk("write_bytes(Path(sys.argv[1]) / 'file', b'x' * 5000)", tmp_path)
    assert re.search("HarnessError: " + sentence("cannot-write", path=tmp_path / "file", error="File too large"), told)
    told = run_on_full_disk("write_files(Path(sys.argv[1]), {'file': b'x', 'large': b'x' * 5000})", tmp_path)
    assert re.search(sentence("cannot-write", path=tmp_path / "large"), told)
    assert (names(tmp_path), (tmp_path / "file").read_bytes()) == (["file"], b"before")


def test_a_folder_that_cannot_be_written_is_a_sentence_with_the_advice(tmp_path: Path) -> None:
    make_folder(tmp_path / "new" / "deep")
    assert names(tmp_path / "new" / "deep") == []
    (tmp_path / "taken").touch()
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(HarnessError, match=sentence("cannot-write", path="taken", advice="--out")):
            make_folder(folder, advice="give --out another")
    for path in (tmp_path / "taken" / "file", tmp_path / "nowhere" / "file", tmp_path / "new"):
        for action in (check_writable, lambda path: write_bytes(path, b"")):
            with pytest.raises(HarnessError, match=sentence("cannot-write")):
                action(path)
    check_writable(tmp_path / "taken")
    assert names(tmp_path) == ["new", "taken"]


def test_what_fails_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"), write_file(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError("broken")
    assert names(tmp_path) == []


def test_what_a_killed_process_left_of_a_file_is_removed(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from harness.core.files import write_file\n"
        "with write_file(Path(sys.argv[1])) as temporary: temporary.touch(); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], check=False)
    others = [".file.1.tmp", ".file.name.1.2.tmp", ".file.x.2.tmp", "other"]
    for name in others:
        (tmp_path / name).touch()
    assert len(names(tmp_path)) == 5
    remove_temporary_files([tmp_path / "file"])
    assert names(tmp_path) == others


def test_writers_at_a_time_do_not_mix(tmp_path: Path) -> None:
    contents = {bytes([letter]) * 200_000 for letter in b"abcdefgh"}
    seen = set()
    with ThreadPoolExecutor(4) as pool:
        written = [pool.submit(write_bytes, tmp_path / "file", content) for content in sorted(contents) * 4]
        while not all(future.done() for future in written):
            if (tmp_path / "file").exists():
                seen.add((tmp_path / "file").read_bytes())
    for future in written:
        future.result()
    assert seen | {(tmp_path / "file").read_bytes()} <= contents
    assert names(tmp_path) == ["file"]


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(HarnessError, match=sentence("foreign-folder", folder=tmp_path)), model(tmp_path):
        pass
    with pytest.raises(HarnessError, match=sentence("not-a-folder")), model(tmp_path / "thesis.txt"):
        pass
    with pytest.raises(HarnessError, match=sentence("cannot-write")), model(tmp_path / "thesis.txt" / "model"):
        pass
    assert (names(tmp_path), (tmp_path / "thesis.txt").read_text()) == (["thesis.txt"], "years of work")


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".model.lock")
    with lock, pytest.raises(HarnessError, match=sentence("folder-in-use")), model(tmp_path / "model"):
        pass


def test_a_folder_stays_if_filling_another_fails(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with model(folder) as filling:
        (filling / MARK).write_text("first")
    with pytest.raises(RuntimeError, match="broken"), model(folder) as filling:
        (filling / MARK).write_text("second")
        raise RuntimeError("broken")
    assert (folder / MARK).read_text() == "first"
    with model(folder) as filling:
        (filling / MARK).write_text("third")
    assert (folder / MARK).read_text() == "third"
    assert names(tmp_path) == ["model"]


def test_what_a_killed_process_left_of_a_folder_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".model.filling").mkdir()
    (tmp_path / ".model.filling" / "half").write_text("half")
    with model(tmp_path / "model") as filling:
        assert names(filling) == []
        (filling / MARK).write_text("whole")
    assert names(tmp_path) == ["model"]


# Ends itself, as the second argument says, right before the change to the file system that the third one numbers.
REPLACING = """
import os, signal, sys
from pathlib import Path
from harness.core.files import replace_folder
folder, how, moment, left = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), []
def count(event, arguments):
    if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
        left.append(event)
        if len(left) == moment:
            if how == "raise":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGKILL)
with replace_folder(folder, lambda there: (there / "mark").is_file(), "a compiled model") as filling:
    (filling / "mark").write_text("second")
    sys.addaudithook(count)
print(len(left))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_an_interrupted_replacement_loses_neither_the_old_nor_the_new_folder(tmp_path: Path, how: str) -> None:
    """Whatever the moment, the old contents or all of the new ones are there, at the latest at the next start."""
    folder, moment = tmp_path / "model", 0
    while True:
        moment += 1
        with model(folder) as filling:
            (filling / MARK).write_text("first")
        command = [sys.executable, "-c", REPLACING, str(folder), how, str(moment)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            break
        if how == "raise":
            assert (folder / MARK).read_text() in ("first", "second"), f"moment {moment}"
        with pytest.raises(RuntimeError, match="broken"), model(folder) as filling:
            assert (folder / MARK).read_text() in ("first", "second"), f"moment {moment}"
            raise RuntimeError("broken")
        assert names(tmp_path) == ["model"]
    assert moment == int(done.stdout) + 1 > 4


def test_a_folder_that_was_replaced_when_a_process_was_killed_is_the_new_one(tmp_path: Path) -> None:
    for name, content in ((".model.previous", "first"), (".model.filling", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARK).write_text(content)
    with pytest.raises(RuntimeError, match="broken"), model(tmp_path / "model"):
        raise RuntimeError("broken")
    assert (tmp_path / "model" / MARK).read_text() == "second"
    (tmp_path / "model").rename(tmp_path / ".model.previous")
    with (
        pytest.raises(HarnessError, match=sentence("foreign-folder")),
        replace_folder(tmp_path / "model", lambda there: False, "a reproduction"),
    ):
        pass
    assert (tmp_path / "model" / MARK).read_text() == "second"


def test_scratch_folders_of_several_processes_do_not_meet(tmp_path: Path) -> None:
    holding = """
import sys
from pathlib import Path
from harness.core.files import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "file").write_text("there")
    print(folder, flush=True)
    sys.stdin.read()
"""
    parent = tmp_path / "parent"
    with subprocess.Popen(
        [sys.executable, "-c", holding, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with scratch_folder(parent) as ours:
            assert ours != theirs and not list(ours.iterdir())
        assert not ours.exists() and (theirs / "file").read_text() == "there"
        other.kill()
    assert theirs.exists()
    with scratch_folder(parent) as ours:
        assert [path for path in parent.iterdir() if path.is_dir()] == [ours]
    assert not list(parent.iterdir())


def test_what_is_pruned_leaves_as_much_free_as_it_takes(tmp_path: Path) -> None:
    """Files with holes take no space and count by their size."""
    free = shutil.disk_usage(tmp_path).free
    for day, name in enumerate("abc"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(free * 6 // 10)
        os.utime(tmp_path / name, (day, day))
    prune_files(free * 100, tmp_path.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"b", "c"}
