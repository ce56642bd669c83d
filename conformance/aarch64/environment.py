"""An AArch64 machine on any other: QEMU's user-mode emulation, and a folder with Debian's Python and the wheels.

Nothing is installed into the system. `apt-get` fetches Debian's packages for arm64, and QEMU where it is not
installed, which are unpacked into a folder of the cache; `pip` fetches wheels. Each step leaves its folder whole or not
at all, and is not repeated until what it is made of changes. On an AArch64 machine there is nothing to emulate: it is
used as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conformance.aarch64.cpuinfo import CPUS, cpuinfo
from harness.core.errors import HarnessError
from harness.core.files import cache_root, make_folder, write_text
from harness.runtime.cpu import architecture
from harness.runtime.system import read_text

CPU = "neoverse-n1"
"""What is emulated where nothing else is asked for: Graviton2's and Ampere Altra's core, with NEON, without SVE."""
ROOT = Path(__file__).resolve().parents[2]
SET_UP = "make test-arm sets it up"
_VERSION = "1"
"""Of what this module makes of the packages."""
_MADE_OF = "made-of"
"""The file with the digest of what the folder was made of."""
_PACKAGES = ("python3", "libstdc++6", "zlib1g")
_QEMU_PACKAGE, _QEMU = "qemu-user-static", "qemu-aarch64-static"
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_24_aarch64", "manylinux2014_aarch64")
_PROGRAMS = ("apt-get", "dpkg-deb")


@dataclass(frozen=True)
class Machine:
    """A machine that runs AArch64 code.

    Attributes:
        python: Its Python, which runs like any program.
        emulated: Whether it is not this machine itself.
    """

    python: Path
    emulated: bool

    def run(self, *arguments: str, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Runs its Python with this project on the path, and waits for its end."""
        return subprocess.run(
            [str(self.python), *arguments],
            capture_output=True,
            text=True,
            env=environment(),
            cwd=ROOT,
            timeout=timeout,
            check=False,
        )


def environment() -> dict[str, str]:
    """This process's environment, with this project on Python's path."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def folder() -> Path:
    """Where it all is."""
    return cache_root() / "aarch64"


def _requirements() -> list[str]:
    """What a device needs, as pip names it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["device"]]


def _made_of() -> str:
    """The digest of what decides what is in the folder."""
    content = [_VERSION, *_requirements(), (ROOT / "constraints.txt").read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()


def _is_current() -> bool:
    return read_text(folder() / _MADE_OF) == _made_of()


def machine(cpu: str = CPU) -> Machine:
    """Returns the machine that is set up.

    Args:
        cpu: One of `CPUS`; without a meaning on an AArch64 machine.

    Raises:
        HarnessError: It is not set up.
    """
    if architecture() == "aarch64":
        return Machine(Path(sys.executable), emulated=False)
    python = folder() / cpu / "usr/bin/python"
    if not (python.exists() and _is_current()):
        raise HarnessError(f"there is no emulated AArch64 machine of this version in {folder()}: {SET_UP}")
    return Machine(python, emulated=True)


def machine_for(cpu: str | None) -> Machine:
    """Returns the machine that runs code for a CPU, by LLVM's name of it: what `CPU` lacks, QEMU's `max` has.

    Raises:
        HarnessError: It is not set up.
    """
    return machine(CPU if cpu in (None, CPU) else "max")


def set_up(announce: Callable[[str], None]) -> Machine:
    """Sets up what is not there yet, and returns the machine.

    Args:
        announce: Called with a sentence for each step as it begins.

    Raises:
        HarnessError: A program is missing or fails.
    """
    if architecture() == "aarch64":
        return machine()
    make_folder(folder())
    if not _is_current():
        for entry in folder().iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        write_text(folder() / _MADE_OF, _made_of())
    qemu = _qemu(announce)
    root = folder() / "root"
    with _made(root) as new:
        if new is not None:
            announce(f"Debian's Python for arm64, into {root}")
            _require_programs()
            _unpack(new, _fetched(_PACKAGES, "arm64"))
            _merge_usr(new)
    wheels = root / "usr/local/lib" / _python_of(root) / "dist-packages"
    with _made(wheels) as new:
        if new is not None:
            announce(f"wheels for AArch64, into {wheels} (0.6 GB)")
            _install_wheels(new, _python_of(root))
    for cpu in CPUS:
        with _made(folder() / cpu) as new:
            if new is not None:
                announce(f"the processor {cpu}")
                _make_processor(new, folder() / cpu, root, qemu, cpu)
    return machine()


def _qemu(announce: Callable[[str], None]) -> Path:
    """QEMU's emulator: the installed one, otherwise the one in the folder, which is fetched."""
    for name in (_QEMU, "qemu-aarch64"):
        if found := shutil.which(name):
            return Path(found)
    with _made(folder() / "qemu") as new:
        if new is not None:
            announce(f"QEMU, into {folder() / 'qemu'}")
            _require_programs()
            _unpack(new, _fetched((_QEMU_PACKAGE,), None))
            for other in (new / "usr/bin").iterdir():  # of other architectures, 0.3 GB
                if other.name != _QEMU:
                    other.unlink()
    return folder() / "qemu/usr/bin" / _QEMU


def _require_programs() -> None:
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise HarnessError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, which fetch and unpack Debian's "
            "packages: do this on Debian, or in a container with it"
        )


@contextmanager
def _made(place: Path) -> Iterator[Path | None]:
    """Gives a folder to fill, which is renamed to `place` at the end; None if that is there already."""
    if place.exists():
        yield None
        return
    new = place.with_name(f"{place.name}.unfinished")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    new.rename(place)


def _fetched(packages: Sequence[str], foreign: str | None) -> list[Path]:
    """Packages with everything that they need, from where this machine's own come from.

    Args:
        packages: Their names.
        foreign: The architecture, for which nothing is taken to be installed; None for this machine's, without what
            they need.
    """
    work = folder() / f"apt-{foreign or 'own'}"
    shutil.rmtree(work, ignore_errors=True)
    for part in ("lists/partial", "archives/partial"):
        (work / part).mkdir(parents=True)
    (work / "status").touch()
    options = {
        "Dir::State::Lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work,
        "Dir::Cache::Archives": work / "archives",
        "Dir::Log": work,
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
    }
    if foreign is not None:
        options |= {"APT::Architecture": foreign, "APT::Architectures": foreign}
    given = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    _run(["apt-get", *given, "--quiet", "update"], "Debian's lists of packages cannot be fetched")
    names = " ".join(packages)
    if foreign is None:
        command = ["apt-get", *given, "--quiet", "download", *packages]
    else:
        command = ["apt-get", *given, "--quiet", "--yes", "--no-install-recommends", "--download-only", "install"]
        command += packages
    _run(command, f"{names} for {foreign or 'this machine'} cannot be fetched", work / "archives")
    found = sorted((work / "archives").glob("*.deb"))
    if not found:
        raise HarnessError(f"apt-get fetched nothing for {names}, in {work}")
    return found


def _unpack(into: Path, packages: Sequence[Path]) -> None:
    for package in packages:
        _run(["dpkg-deb", "--extract", str(package), str(into)], f"{package} cannot be unpacked")
    shutil.rmtree(packages[0].parents[1])


def _merge_usr(root: Path) -> None:
    """Adds the links that a package of Debian makes when it is installed, where everything lies below `usr`."""
    for name in ("lib", "bin"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")


def _python_of(root: Path) -> str:
    """The name of the Python there, `python3.11`."""
    return (root / "usr/bin/python3").resolve().name


def _install_wheels(into: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(into)]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--only-binary=:all:"]
    command += ["--python-version", python.removeprefix("python"), *(f"--platform={name}" for name in _PLATFORMS)]
    _run([*command, *_requirements()], "wheels for AArch64 cannot be installed")


def _make_processor(new: Path, place: Path, root: Path, qemu: Path, cpu: str) -> None:
    """Fills a folder with what a machine with this processor shows; everything else is that of `root`."""
    (new / "proc").mkdir()
    for entry in root.iterdir():
        if entry.name != "usr":
            (new / entry.name).symlink_to(entry)
    (new / "usr/bin").mkdir(parents=True)
    for entry in (root / "usr").iterdir():
        if entry.name != "bin":
            (new / "usr" / entry.name).symlink_to(entry)
    real = (root / "usr/bin/python3").resolve()
    (new / "usr/bin/python3").symlink_to(real)
    # A shell script: this machine's kernel starts it for an emulated process, too.
    started = shlex.join([str(qemu), "-cpu", cpu, "-L", str(place), "-0"])
    write_text(new / "usr/bin/python", f'#!/bin/sh\nexec {started} "$0" {shlex.quote(str(real))} "$@"\n')
    (new / "usr/bin/python").chmod(0o755)
    ask = "import ctypes; f = ctypes.CDLL(None).getauxval; f.restype = ctypes.c_ulong; print(f(16), f(26))"
    asked = [str(qemu), "-cpu", cpu, "-L", str(root), str(real), "-c", ask]
    words = [int(word) for word in _run(asked, f"Python does not run on an emulated {cpu}").split()]
    write_text(new / "proc/cpuinfo", cpuinfo(cpu, words[0], words[1], os.cpu_count() or 1))


def _run(command: Sequence[str], problem: str, where: Path | None = None) -> str:
    """What a command prints.

    Raises:
        HarnessError: It fails; the sentence begins with `problem`.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=where, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if re.match(r"(E|ERROR|error|.*rror:)", line)]
        reason = (lines or done.stderr.splitlines() or ["no reason given"])[-1].strip()
        raise HarnessError(f"{problem} ({command[0]}: {reason})")
    return done.stdout
