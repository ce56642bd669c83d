"""Two runs of the same suite, side by side.

    pytest perf/test_components.py --benchmark-compare=before.json      # compares the run with a stored one
    python -m perf.compare before.json after.json                       # compares two stored ones

Both need raw rounds: files of `--benchmark-json`, or of `--benchmark-save`. `perf/shifts.py` says what counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.core.errors import HarnessError
from perf.shifts import checked, compare_runs, read_run
from perf.tables import comparison_table


def main(arguments: Sequence[str]) -> int:
    """Takes two files; returns the exit status: 1 for a slowdown, 2 for files that cannot be compared."""
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    paths = [Path(argument) for argument in arguments]
    try:
        before, after = (read_run(path) for path in paths)
        found = checked(compare_runs(before, after), str(paths[0]))
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(comparison_table(found, str(paths[0])))
    return int(any(comparison.is_slowdown for comparison in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
