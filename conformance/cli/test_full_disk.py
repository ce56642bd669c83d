"""A disk that gets full, whichever it is, is one sentence; nothing half-written is left, and what was there stays."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance.cli.test_interrupted import SEED, Commands, files
from conformance.cli.test_interrupted import begun as begun_with_pictures
from conformance.cli.test_interrupted import commands as commands
from conformance.cli.test_interrupted import results as results_of
from conformance.cli.test_interrupted_commands import COMMANDS, begun, results
from conformance.cli.test_interrupted_commands import compiled as compiled

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux mounts a small disk in memory"),
    pytest.mark.usefixtures("one_thread", "forked_processes"),
]
Mount = Callable[[Path, int], None]
PAGE, DISKS = 4_096, 5

CASES = [
    *[("compile", "out", room) for room in (4_096, 40_000, 1_000_000)],
    *[("compile", "temporary", room) for room in (4_096, 200_000)],
    *[("pack", "out", room) for room in (4_096, 3_000_000)],
    ("pack", "temporary", 40_000),
    *[("verify", "out", room) for room in (4_096, 40_000)],
    *[("verify", "temporary", room) for room in (4_096, 200_000)],
    ("verify", "cache", 4_096),
]
"""A command, what of it is on the disk, and the bytes of the disk beside what is there before."""
DAILY = {("compile", "out", 40_000), ("compile", "temporary", 200_000), ("pack", "out", 3_000_000)}
DAILY |= {("verify", "out", 40_000), ("verify", "temporary", 4_096)}


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a disk of so many bytes."""
    mounted = []

    def mount(folder: Path, size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a small disk")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("command", "place", "room"),
    [pytest.param(*case, marks=[] if case in DAILY else pytest.mark.wide) for case in CASES],
)
def test_a_full_disk_is_one_sentence(
    command: str, place: str, room: int, commands: Commands, mount: Mount, compiled: Path, tmp_path: Path
) -> None:
    existing = compiled if command == "pack" else None
    there = occupied(compiled) if existing and place == "out" else 0
    begun(tmp_path, None)
    disk = tmp_path / "disk"
    mount(disk, there + room)
    shutil.rmtree(tmp_path / place, ignore_errors=True)
    (disk / place).mkdir()
    (tmp_path / place).symlink_to(disk / place)
    if place == "cache":
        (tmp_path / place / "full").write_bytes(bytes(room))  # small outputs would fit
    if existing is not None:
        shutil.copytree(existing, tmp_path / "out", dirs_exist_ok=True)
    before = results(tmp_path)
    code, _, told = commands.ended(COMMANDS[command], tmp_path)
    assert code == 2 and is_one_sentence(told), told
    assert results(tmp_path) == before
    assert {path.name for path in disk.iterdir()} <= {place}
    assert not list(tmp_path.rglob("*.tmp")) and not list((tmp_path / "temporary").glob("sam3-tvm-*"))


def test_what_is_only_kept_for_later_is_left_out_where_its_disk_is_full(
    commands: Commands, mount: Mount, tmp_path: Path
) -> None:
    begun(tmp_path, None)
    mount(tmp_path / "cache", 4_096)
    commands.run(COMMANDS["compile"], tmp_path)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 4_096]


@pytest.mark.parametrize("work", ["segment", "track"])
def test_results_that_do_not_fit_are_one_sentence_and_completed_on_a_larger_disk(
    work: str, commands: Commands, mount: Mount, tmp_path: Path
) -> None:
    whole = begun_with_pictures(tmp_path / "whole", work)
    there = occupied(whole)
    commands.run(work, whole)
    expected, _ = results_of(whole)
    draw = random.Random(f"{SEED} {work}")
    for number in range(DISKS):
        folder, room = tmp_path / str(number), PAGE * draw.randrange(there // PAGE, occupied(whole) // PAGE)
        print(f"{work}: {room} bytes, seed {SEED}")
        mount(folder, room)
        begun_with_pictures(folder, work)
        theirs = files(folder)
        code, _, told = commands.ended(work, folder)
        assert code == 2 and is_one_sentence(told), told
        now = files(folder)
        assert theirs.items() <= now.items()
        assert not [name for name in now if name.endswith(".tmp") and name not in theirs]
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        commands.run(work, folder)
        assert results_of(folder)[0] == expected


def is_one_sentence(told: str) -> bool:
    """Returns whether a command told that a disk is full, and nothing else."""
    named = told.startswith("error: cannot write ") and "No space left on device" in told
    return named and "; " in told and told.count("\n") == 1


def occupied(folder: Path) -> int:
    """Returns the bytes that all files and folders in a folder take on such a disk."""
    return sum(-(-path.lstat().st_size // PAGE) * PAGE for path in folder.rglob("*") if path.is_file())
