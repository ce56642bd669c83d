"""`python -m conformance.calibration`: which faults `verify` detects, and `diagnose` locates and explains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.calibration.faults import Fault, drawn
from conformance.calibration.layers import LAYERS
from conformance.calibration.measuring import CRASHED, Request, add, records
from conformance.calibration.preparing import COMPONENTS
from conformance.calibration.table import render
from harness.core.errors import HarnessError
from harness.core.processes.call import WorkerEnd, run_isolated


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    asked = _parsed(arguments)
    try:
        if not asked.table:
            measure(_faults(asked), asked.file, asked.reproduce, asked.seconds)
        print(render(records(asked.file)))
    except KeyboardInterrupt:
        print(f"interrupted: the same command goes on with the faults that {asked.file} has not", file=sys.stderr)
        return 130
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(faults: Sequence[Fault], file: Path, reproduce: int, seconds: float) -> None:
    """Measures the faults that a file does not have, component by component, in processes that may crash.

    Args:
        faults: The faults.
        file: Gets a line for each.
        reproduce: How many of the first are cut out as well.
        seconds: Limit of time for each; a fault may be a loop without an end.
    """
    reproduced = frozenset(fault.number for fault in faults[:reproduce])
    for component in dict.fromkeys(fault.component for fault in faults):
        while todo := [fault for fault in _missing(faults, file) if fault.component == component]:
            request = Request(component, tuple(todo), file, seconds, reproduced)
            _measured(request, len(faults))


def _measured(request: Request, count: int) -> None:
    """Measures faults until the last of them, or until one ends the process."""
    entered = [""]

    def announce(stage: str) -> None:
        entered.append(stage)
        print(f"{request.component}: {'building' if not stage.isdigit() else f'fault {stage} of {count}'}", flush=True)

    ended = run_isolated("conformance.calibration.measuring:measure_all", request, on_stage=announce)
    if ended.kind is WorkerEnd.OK:
        return
    line = ended.error.message.partition("\n")[0] if ended.error else ended.kind.value
    if not ended.stage.isdigit() or ended.kind is WorkerEnd.FAILED:
        raise HarnessError(f"{request.component} cannot be calibrated: {line}")
    (fault,) = (fault for fault in request.faults if fault.number == int(ended.stage))
    if fault in _missing([fault], request.file):
        add(request.file, {"fault": fault.to_json(), "where": "", "problem": line, "ended": CRASHED})


def _missing(faults: Sequence[Fault], file: Path) -> list[Fault]:
    done = [record["fault"] for record in records(file)]
    return [fault for fault in faults if fault.to_json() not in done]


def _faults(asked: argparse.Namespace) -> list[Fault]:
    layers = {
        name: (max(layer.weight, 1) if asked.layer else layer.weight, layer.kinds)
        for name, layer in LAYERS.items()
        if name in (asked.layer or LAYERS)
    }
    print(f"seed {asked.seed}")
    return [drawn(asked.seed, n, asked.component or COMPONENTS, layers) for n in range(asked.faults)]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m conformance.calibration", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the draw; default: 0")
    parser.add_argument("--faults", type=int, default=150, metavar="N", help="number of faults; default: 150")
    parser.add_argument("--component", action="append", choices=COMPONENTS, help="repeat for several; default: all")
    parser.add_argument(
        "--layer", action="append", choices=LAYERS, help="repeat for several; default: by their weights"
    )
    parser.add_argument(
        "--file",
        type=Path,
        default=Path("calibration.jsonl"),
        help="gets a line for each; a file that is there goes on",
    )
    parser.add_argument("--reproduce", type=int, default=0, metavar="N", help="cut out the first N faults as well")
    parser.add_argument("--seconds", type=float, default=300, help="limit of time for each fault; default: 300")
    parser.add_argument("--table", action="store_true", help="only print the table of the file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
