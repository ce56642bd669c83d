"""`python -m conformance.calibration.suite`: which layers of the suite see faults in the project's source files."""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conformance.calibration.faults import picked
from conformance.calibration.measuring import add, records
from conformance.calibration.sources import HARNESS, KINDS, Edit, Place, edits, marked
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
NOT_SEEN, NOT_REACHED, TIME_IS_UP = "not seen", "not reached", "time is up"
"""How a fault ends that no test fails on, that none comes to, or that none fails on in time.

The others end with the name of the layer that saw them.
"""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)
_COLLECTED = re.compile(r"^(\S+\.py)::", re.M)
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


def mark(checkout: Path, places: Sequence[Place], folder: Path) -> None:
    """Changes a checkout so that whatever comes to a place makes a file in a folder, which is named by its number."""
    by_file: dict[str, list[tuple[Edit, str]]] = {}
    for number, place in enumerate(places):
        by_file.setdefault(place.file, []).append((place.edit, f"open({str(folder / str(number))!r}, 'a').close()"))
    for file, marks in by_file.items():
        path = checkout / "harness" / file
        path.write_bytes(marked(path.read_bytes(), marks))


def reached(marks: Path, checkout: Path, layer: str, test: str, seconds: float) -> list[int]:
    """Runs the tests that a file has in a layer, in a marked checkout; returns the numbers of the places they reach."""
    marks.mkdir()
    try:
        with suppress(subprocess.TimeoutExpired):
            _run_tests(checkout, [test], layer, seconds)
        return sorted(int(file.name) for file in marks.iterdir())
    finally:
        shutil.rmtree(marks)


def measure(place: Place, checkout: Path, tests: Mapping[str, Sequence[str]], seconds: float) -> dict[str, Any]:
    """Puts a fault into a checkout, and runs the suite until a test fails.

    Args:
        place: The place of the fault.
        checkout: A clone of the repository, which is as before afterwards.
        tests: The files of tests that reach the place, by layer; those that are likely to see the fault run first.
        seconds: Limit of time for the tests of each layer.
    """
    path = checkout / "harness" / place.file
    right, start = path.read_bytes(), time.monotonic()
    ended, failed = NOT_SEEN if any(tests.values()) else NOT_REACHED, ""
    path.write_bytes(place.edit.applied(right))
    try:
        for layer, files in tests.items():
            if not files:
                continue
            try:
                done = _run_tests(checkout, ["-x", *_ordered(files, place.file)], layer, seconds)
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


def _run_tests(
    checkout: Path, arguments: Sequence[str], layer: str, seconds: float
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command += ["-m", f"not cuda and not metal and {_MARKERS[layer]}", *arguments]
    # What is read from a cache reaches no code. Commands that tests start elsewhere import the checkout, too.
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as cache:
        environment = {**os.environ, "PYTHONPATH": str(checkout), CACHE_VARIABLE: cache}
        return subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )


def files_of(checkout: Path, tests: Sequence[str], layer: str) -> list[str]:
    """Returns the files that have tests of a layer, below some folders."""
    collected = _run_tests(checkout, ["--collect-only", *tests], layer, seconds=600).stdout
    return list(dict.fromkeys(_COLLECTED.findall(collected)))


def _ordered(files: Sequence[str], changed: str) -> list[str]:
    """Returns files of tests: those whose folder or name is most like the changed file's first, then cheap ones."""
    words, known = _words(changed), recorded()
    return sorted(files, key=lambda file: (-len(words & _words(file)), known.get(file, 0)))


def _words(file: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", file.removesuffix(".py")))


def render(found: Sequence[dict[str, Any]]) -> str:
    """Returns the table of the parts of the project, and the faults that were not seen, as Markdown."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for record in found:
        parts.setdefault(record["part"], []).append(record)
    columns = ("part", "drawn", "seen by smoke", "by test", *_ENDS[2:])
    rows = [
        [name, str(len(group)), *(str(sum(record["ended"] == end for record in group)) for end in _ENDS)]
        for name, group in (*sorted(parts.items()), ("all", found))
    ]
    missed = [record for record in found if record["ended"] in _ENDS[2:]]
    names = [[f"`{record['where']}`".replace("|", "\\|"), record["ended"]] for record in missed]
    return "\n\n".join((markdown(columns, rows), *([markdown(("where", "ended"), names)] if names else [])))


_ENDS = (SMOKE, TEST, TIME_IS_UP, NOT_SEEN, NOT_REACHED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parsed(arguments)
    try:
        if not options.table:
            _measure_all(options)
        print(render([record for record in records(options.file) if "number" in record]))
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
    drawn = [draw_place(options.seed, number, choices) for number in range(options.faults)]
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
        checkout = clone(Path(folder) / "checkout")
        reaching = _find_reaching(options, drawn, checkout, Path(folder))
        done = [(record["seed"], record.get("number")) for record in records(options.file)]
        for number, place in enumerate(drawn):
            if (options.seed, number) in done:
                continue
            print(f"fault {number} of {options.faults}: {place}", flush=True)
            record = measure(place, checkout, reaching[number], options.seconds)
            add(options.file, {"seed": options.seed, "number": number, **record})
            print(f"  {record['ended']} after {record['seconds']} s {record['test']}", flush=True)


def _find_reaching(
    options: argparse.Namespace, drawn: Sequence[Place], checkout: Path, folder: Path
) -> list[dict[str, list[str]]]:
    """Returns the files of tests that reach each place, by layer; each file runs once, and the records say so."""
    found: list[dict[str, list[str]]] = [{layer: [] for layer in _MARKERS} for _ in drawn]
    run = {"seed": options.seed, "faults": options.faults}
    known = {
        (record["layer"], record["file"]): record["reached"]
        for record in records(options.file)
        if run.items() <= record.items()
    }
    marks, with_marks = folder / "marks", clone(folder / "marked")
    mark(with_marks, drawn, marks)
    for layer in _MARKERS:
        for file in files_of(checkout, options.tests, layer):
            numbers = known.get((layer, file))
            if numbers is None:
                numbers = reached(marks, with_marks, layer, file, options.seconds)
                add(options.file, {**run, "layer": layer, "file": file, "reached": numbers})
                print(f"{file} reaches {len(numbers)} of {options.faults} in {layer}", flush=True)
            for number in numbers:
                found[number][layer].append(file)
    return found


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
