"""`python -m conformance.calibration.suite`: which layers of the suite see faults in the project's source files."""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.calibration.faults import picked
from conformance.calibration.measuring import add, records
from conformance.calibration.sources import HARNESS, KINDS, Place, edits
from conformance.calibration.table import markdown
from conformance.layers import recorded
from harness.core.errors import HarnessError
from harness.core.files import CACHE_VARIABLE
from harness.core.settings import REPOSITORY

SMOKE, TEST = "smoke", "test"
"""The layers of `make smoke`, and those that `make test` adds."""
_MARKERS = {
    SMOKE: "(law or smoke)",
    TEST: "not (law or smoke) and not wide",
}
NOT_SEEN, TIME_IS_UP = "not seen", "time is up"
"""How a fault ends that no test fails on, or none in time; the others end with the name of the layer that saw them."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)
_TESTS_FAILED = (1, 2)
"""Exit codes of pytest: tests failed, or could not be imported."""


def places() -> dict[str, list[Place]]:
    """Returns every place where a fault can be, by kind; its part is the first two folders of its file."""
    found: dict[str, list[Place]] = {kind: [] for kind in KINDS}
    for path in sorted(HARNESS.rglob("*.py")):
        file = path.relative_to(HARNESS)
        for kind, edit in edits(path.read_bytes()):
            found[kind].append(Place("/".join(file.parts[:2]), file.as_posix(), kind, edit))
    return found


def draw_place(seed: int, number: int, choices: Mapping[str, Sequence[Place]]) -> Place:
    """Draws the place of a fault: each kind is as likely as the others, and each of its places."""
    draw = random.Random(f"{seed} {number}")
    place: Place = picked(choices[draw.choice(sorted(choices))], draw.random())
    return place


def clone(folder: Path) -> Path:
    """Clones the last commit of the repository into a folder, and returns the folder."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(REPOSITORY), str(folder)], check=True)
    return folder


def measure(place: Place, checkout: Path, tests: Sequence[str], seconds: float) -> dict[str, Any]:
    """Puts a fault into a checkout, and runs the suite until a test fails.

    Args:
        place: The place of the fault.
        checkout: A clone of the repository, which is as before afterwards.
        tests: The files or folders of tests; those that are likely to see the fault run first.
        seconds: Limit of time for the tests of each layer.
    """
    path, ordered = checkout / "harness" / place.file, _ordered(checkout, tests, place.file)
    right, start = path.read_bytes(), time.monotonic()
    ended, failed = NOT_SEEN, ""
    path.write_bytes(place.edit.applied(right))
    try:
        for layer, markers in _MARKERS.items():
            try:
                done = _run_tests(checkout, ordered, markers, seconds)
            except subprocess.TimeoutExpired:
                ended = TIME_IS_UP
                continue
            if done.returncode in _TESTS_FAILED:
                ended, failed = layer, next(iter(_FAILED.findall(done.stdout)), "")
                break
    finally:
        path.write_bytes(right)
    return {
        "part": place.part,
        "where": str(place),
        "ended": ended,
        "test": failed,
        "seconds": round(time.monotonic() - start),
    }


def _run_tests(checkout: Path, tests: Sequence[str], markers: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-m", f"not cuda and not metal and {markers}", *tests]
    # Commands that tests start elsewhere import the checkout, too.
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def _ordered(checkout: Path, tests: Sequence[str], file: str) -> list[str]:
    """Returns the files of tests: those whose folder or name is most like the changed file's first, then cheap ones."""
    changed = set(re.findall(r"[a-z0-9]+", file.removesuffix(".py")))
    known = recorded()
    paths = [
        path for name in tests for path in ([checkout / name] if name.endswith(".py") else _files(checkout / name))
    ]

    def rank(path: Path) -> tuple[int, int]:
        name = path.relative_to(checkout).as_posix()
        words = set(re.findall(r"[a-z0-9]+", name.removesuffix(".py")))
        return -len(words & changed), known.get(name, 0)

    return [path.relative_to(checkout).as_posix() for path in sorted(paths, key=rank)]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("test_*.py"))


def render(found: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the parts of the project, and the faults that were not seen, as Markdown."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for record in found:
        parts.setdefault(record["part"], []).append(record)
    columns = ("part", "drawn", "seen by smoke", "by test", TIME_IS_UP, NOT_SEEN)
    rows = [
        [name, str(len(group)), *(str(sum(record["ended"] == end for record in group)) for end in _ENDS)]
        for name, group in (*sorted(parts.items()), ("all", found))
    ]
    missed = [record for record in found if record["ended"] in (TIME_IS_UP, NOT_SEEN)]
    names = [[f"`{record['where']}`".replace("|", "\\|"), record["ended"]] for record in missed]
    return "\n\n".join((markdown(columns, rows), *([markdown(("where", "ended"), names)] if names else [])))


_ENDS = (SMOKE, TEST, TIME_IS_UP, NOT_SEEN)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parsed(arguments)
    try:
        if not options.table:
            _measure_all(options)
        print(render(records(options.file)))
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on with the faults that {options.file} has not", file=sys.stderr)
        return 130
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure_all(options: argparse.Namespace) -> None:
    print(f"seed {options.seed}", flush=True)
    choices = places()
    done = [(record["seed"], record["number"]) for record in records(options.file)]
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
        checkout = clone(Path(folder) / "checkout")
        os.environ.setdefault(CACHE_VARIABLE, str(Path(folder) / "cache"))
        for number in range(options.faults):
            if (options.seed, number) in done:
                continue
            place = draw_place(options.seed, number, choices)
            print(f"fault {number} of {options.faults}: {place}", flush=True)
            record = measure(place, checkout, options.tests, options.seconds)
            add(options.file, {"seed": options.seed, "number": number, **record})
            print(f"  {record['ended']} after {record['seconds']} s {record['test']}", flush=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.calibration.suite", description=__doc__)
    parser.add_argument("tests", nargs="*", default=["conformance"], help="files or folders of tests; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; default: 0")
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="number of faults; default: 200")
    parser.add_argument(
        "--file", type=Path, default=Path("suite.jsonl"), help="gets a line for each; a file that is there goes on"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="limit for each layer of a fault; default: 3600")
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
