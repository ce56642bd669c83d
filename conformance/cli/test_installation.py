"""The base installation runs compiled models; whatever compiles says in a sentence what it lacks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from conformance.support.sentences import sentence
from harness.cli.options import COMPILES
from harness.core.settings import FIXTURES, REPOSITORY

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({modules}))  # what an import of something absent finds
sys.argv = ["sam3-tvm", *{arguments}]
from harness.cli.main import main
main()
"""


def run_without(modules: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = WITHOUT.format(modules=modules, arguments=arguments)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "verify",
        "explain",
        "diagnose",
        "budget --component x --limit 1",
        "compile --out out",
        "tune",
        "pack --into out",
        "inspect x",
    ],
)
def test_what_compiles_says_what_is_missing(command: str) -> None:
    done = run_without(COMPILES, *command.split())
    assert done.returncode == 2
    assert re.fullmatch("error: " + sentence("not-installed", names="tvm, torch and sam3"), done.stderr.strip())


def test_one_missing_module_is_named_alone() -> None:
    assert re.search("error: " + sentence("not-installed", names="torch"), run_without(("torch",), "verify").stderr)


# The doctor every night: by day `test_doctor.py` and `test_poisoned_folder.py` run it.
@pytest.mark.parametrize(
    "command", ["list", "--version", "verify --help", pytest.param("doctor", marks=pytest.mark.wide)]
)
def test_the_rest_works(command: str) -> None:
    done = run_without(COMPILES, *command.split())
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.law
def test_the_wheel_has_every_file_that_is_no_code() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = [Path(pattern).name for patterns in settings["package-data"].values() for pattern in patterns]
    files = [path for folder in (REPOSITORY / "harness", FIXTURES) for path in folder.rglob("*") if path.is_file()]
    data = {path.name for path in files if path.suffix not in {".py", ".pyi", ".pyc"} and path.name != ".lock"}
    assert {"cat.png", "index.html", "metal_stdlib"} <= data
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
