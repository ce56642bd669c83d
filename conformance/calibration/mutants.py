"""Puts faults into copies of the checkout and judges what `verify`, `diagnose` and `make smoke` say of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from conformance.calibration.measuring import CRASHED, OUTPUTS, UNDETECTED, UNREACHED, add, judged, records
from conformance.calibration.observing import CHECKOUT, OBSERVED, RUNS, TRUTH
from conformance.calibration.observing import OUTPUTS as FILE_OF_OUTPUTS
from conformance.calibration.sources import PARTS, Edit, editable
from harness.core.program import Arrays
from harness.diagnose.diagnosis import Cause
from harness.files import cache_root, temporary_folder
from harness.parity.verdict import judge

CASES = (
    *((name, "real") for name in ("box_head", "scoring_head", "object_pointers", "prompt_encoder", "mask_pointer")),
    *((name, "real") for name in ("mask_decoder", "text_encoder", "geometry_encoder")),
    *((name, "real") for name in ("transformer_encoder", "transformer_decoder")),
    *(("memory_attention", strategy) for strategy in ("real", "lowering", "converter", "llm", "tensorir")),
)
"""The components that faults are put into, with their strategies."""

SECONDS = 900
"""Seconds after which a fault is taken for a hang."""

_COPIED = ("harness", "conformance", "fixtures", "perf", "conftest.py", "pyproject.toml")
_BEHIND_THE_PROGRAM = ("targets", "runtime")
"""Parts that come after the lowered program: it is the same with their faults."""
_ROTATION = ("rope", "rotary")


@dataclass(frozen=True)
class Mutant:
    """A fault in a source file, drawn by rule.

    Attributes:
        seed: The seed that it is drawn from.
        number: Its number among the faults of that seed.
        case: The component and the strategy that it is looked for with.
        part: Key of `PARTS`.
        file: The file below `harness/`.
        kind: How it is changed.
        edit: The change.
    """

    seed: int
    number: int
    case: tuple[str, str]
    part: str
    file: str
    kind: str
    edit: Edit

    def to_json(self) -> dict[str, Any]:
        component, strategy = self.case
        return {
            "seed": self.seed,
            "number": self.number,
            "component": component if strategy == "real" else f"{component} {strategy}",
            "layer": self.part,
            "kind": self.kind,
        }

    @cached_property
    def where(self) -> str:
        """The file, the line and the change."""
        source = (CHECKOUT / "harness" / self.file).read_bytes()
        old = source[self.edit.start : self.edit.end].decode()
        return " ".join(f"{self.file}:{self.edit.line}: {old.strip()} → {self.edit.text.strip() or 'nothing'}".split())


@dataclass(frozen=True)
class Observation:
    """What a case showed.

    Attributes:
        found: The contents of `OBSERVED`; nothing if it was not written.
        outputs: The outputs of the compiled program; None if it did not run.
        problem: How the process ended, if it did not end well.
    """

    found: dict[str, Any]
    outputs: Arrays | None
    problem: str


def measure(seed: int, count: int, file: Path, *, jobs: int = 1, smoke: bool = False) -> None:
    """Measures the faults of a seed that a file does not have.

    Args:
        seed: The seed.
        count: How many faults are drawn.
        file: Gets a line for each. The folder beside it keeps what each case shows without a fault.
        jobs: How many run at a time.
        smoke: Whether `make smoke` is asked as well of those that are seen.
    """
    folder = file.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda case: _prepare(case, folder), CASES))
        done = [record["fault"] for record in records(file)]
        mutants = [mutant for mutant in drawn(seed, count, folder) if mutant.to_json() not in done]

        def one(mutant: Mutant) -> None:
            add(file, record := measured(mutant, folder, smoke=smoke))
            print(f"fault {mutant.number} of {count}: {record['ended']}: {mutant.where}", flush=True)

        list(pool.map(one, mutants))


def drawn(seed: int, count: int, folder: Path) -> list[Mutant]:
    """Draws faults: each part is as likely as the others, then each case that reaches it, file, kind and place.

    Args:
        seed: The seed.
        count: How many.
        folder: Has the lines that each case reaches.
    """
    places = {case: editable(CHECKOUT, _observed(folder / "-".join(case))["reached"]) for case in CASES}
    mutants = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        part = draw.choice(list(PARTS))
        case = draw.choice([case for case in CASES if any(place[0] == part for place in places[case])])
        able = [place for place in places[case] if place[0] == part]
        file = draw.choice(sorted({place[1] for place in able}))
        able = [place for place in able if place[1] == file]
        kind = draw.choice(sorted({place[2] for place in able}))
        *_, edit = draw.choice([place for place in able if place[2] == kind])
        mutants.append(Mutant(seed, number, case, part, file, kind, edit))
    return mutants


def measured(mutant: Mutant, folder: Path, *, smoke: bool = False) -> dict[str, Any]:
    """Returns what became of a fault, as JSON can hold it.

    Args:
        mutant: The fault.
        folder: Has what its case shows without it.
        smoke: Whether `make smoke` is asked as well, if the fault is seen.
    """
    began = time.perf_counter()
    right = folder / "-".join(mutant.case)
    with temporary_folder("mutant") as name:
        copy = Path(name)
        _copy(copy, mutant)
        known = "" if mutant.part in _BEHIND_THE_PROGRAM else _observed(right)["program"]
        seen = _observe(mutant.case, copy, copy / "seen", "--program", known)
        record = {"fault": mutant.to_json(), "where": mutant.where, "problem": seen.problem}
        record |= _judged(mutant, seen, right)
        if smoke and record["ended"] not in (UNREACHED, UNDETECTED):
            record["smoke"] = _smoke(copy)
    return record | {"seconds": round(time.perf_counter() - began, 1)}


def _judged(mutant: Mutant, seen: Observation, folder: Path) -> dict[str, Any]:
    right = _observed(folder)
    if seen.found.get("program") == right["program"] and mutant.part not in _BEHIND_THE_PROGRAM:
        return {"ended": UNREACHED, "reason": ""}
    verify = seen.found.get("verify", {"stage": "start"})
    if "status" not in verify or (verify["status"] != "passed" and verify["stage"] != "judge"):
        return {"ended": CRASHED if "status" not in verify else verify["stage"], "reason": verify.get("error", "")}
    passed, outputs = verify["status"] == "passed", seen.outputs
    if outputs is None:
        return {"ended": UNDETECTED if passed else OUTPUTS, "reason": verify["error"], "changed": True, "hole": passed}
    truth = [_arrays(folder / TRUTH.format(name)) for name in RUNS]
    reference, again, exact = truth
    changed = not _same(outputs, _arrays(folder / FILE_OF_OUTPUTS))
    if passed and not changed and seen.found["program"] == right["program"]:
        return {"ended": UNREACHED, "reason": ""}
    told = judged(judge(outputs, reference, exact, reference_again=again))
    return (
        told
        | {"ended": UNDETECTED if passed else OUTPUTS, "reason": verify["error"], "changed": changed}
        | {"hole": passed and (told["ended"] == OUTPUTS or told["hole"])}
        | ({"diagnosis": _diagnosed(mutant, seen.found, right)} if "diagnosis" in seen.found else {})
    )


def _diagnosed(mutant: Mutant, found: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Returns what a diagnosis says, and whether that is right; None where it cannot be told."""
    told = dict(found["diagnosis"])
    known = set(right["functions"].values())
    wrong = {name for name, content in found["functions"].items() if content not in known}
    located: bool | None = None
    if told["cause"] in (Cause.STRATEGY, Cause.EXPORT):
        lines = f"{told['source']} {told['by']}"
        located = mutant.file in lines or any(word in lines for word in _ROTATION) if told["source"] else None
    elif mutant.part == "runtime":
        located = bool(told["changed"] or told["unsteady"] or told["misshapen"])
    elif wrong:
        located = not wrong.isdisjoint(told["named"])
    causes = PARTS[mutant.part].causes
    return told | {
        "located": located,
        "right": None if told["cause"] is None else told["cause"] in causes,
        "reproduced": None,
    }


def _prepare(case: tuple[str, str], folder: Path) -> None:
    """Writes what a case shows without a fault, unless it is there."""
    place = folder / "-".join(case)
    if (place / FILE_OF_OUTPUTS).exists():
        return
    print(f"{' '.join(case)}: without a fault", flush=True)
    seen = _observe(case, CHECKOUT, place, "--trace")
    if seen.found.get("verify", {}).get("status") != "passed" or seen.found["diagnosis"]["faulty"] or seen.problem:
        shutil.rmtree(place)
        raise RuntimeError(f"{' '.join(case)} is not right without a fault: {seen.problem or seen.found}")


def _observe(case: tuple[str, str], checkout: Path, folder: Path, *options: str) -> Observation:
    command = [sys.executable, "-m", "conformance.calibration.observing", *case, str(folder), *options]
    _, problem = _run(command, checkout)
    outputs = folder / FILE_OF_OUTPUTS
    return Observation(
        _observed(folder) if (folder / OBSERVED).exists() else {},
        _arrays(outputs) if outputs.exists() else None,
        problem,
    )


def _smoke(copy: Path) -> str:
    """Returns the first test of `make smoke` that fails in a copy, or nothing."""
    selected = "not cuda and not metal and (law or smoke)"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", selected, "-p", "no:cacheprovider", "conformance"]
    printed, problem = _run(command, copy)
    failed = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0] if failed else problem


def _run(command: Sequence[str], checkout: Path) -> tuple[str, str]:
    """Runs a command of a checkout; returns what it prints, and its last line if it does not end well."""
    caches = checkout / "cache" if checkout != CHECKOUT else cache_root()
    environment = {**os.environ, "PYTHONPATH": str(checkout), "SAM3_TVM_CACHE": str(caches)}
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "", f"it did not end within {SECONDS} s"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return printed, f"{process.returncode}: {lines[-1] if lines else ''}"[:300] if process.returncode else ""


def _copy(copy: Path, mutant: Mutant) -> None:
    """Copies the checkout and its cache, and puts a fault into the copy."""
    for name in _COPIED:
        source = CHECKOUT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy / name)
    if cache_root().exists():
        shutil.copytree(cache_root(), copy / "cache", ignore=shutil.ignore_patterns("*.lock"))
    path = copy / "harness" / mutant.file
    path.write_bytes(mutant.edit.applied(path.read_bytes()))


def _observed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / OBSERVED).read_text())
    return found


def _arrays(file: Path) -> Arrays:
    with np.load(file) as arrays:
        return dict(arrays)


def _same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in other)
