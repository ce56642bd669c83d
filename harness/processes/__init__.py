"""Process isolation: run a function so that a crash, a hang or a memory hog ends one call and never the run.

Each call is a process in a process group of its own: a fresh interpreter, or, where many calls need the same libraries,
a fork of a process that has loaded them once (`Template`). Parent and child talk through files in a private folder,
because a file survives the native crash of its writer:

    request        pickled: what to call, with which argument; there before the child starts
    breadcrumbs    one line per stage entered, written by the child at once
    output         stdout and stderr of the child and its children
    answer         pickled: what came back; absent if the child died
    alive          a pipe, of forks only: its end tells the child that the parent is gone
    ended          the exit code, of forks only: whoever forked them, and not the parent, sees them end

Memory is limited by watching the resident set of the child and its descendants. RLIMIT_AS would be sharper, but torch
and TVM reserve tens of times the address space that they use, and macOS does not enforce it.
"""

from harness.processes.call import (
    DETAILS_BYTES,
    OUTPUT_BYTES,
    Breadcrumb,
    WorkerEnd,
    WorkerResult,
    run_isolated,
)
from harness.processes.processes import Stopped, Template, kill_and_collect, start_python

__all__ = [
    "DETAILS_BYTES",
    "OUTPUT_BYTES",
    "Breadcrumb",
    "Stopped",
    "Template",
    "WorkerEnd",
    "WorkerResult",
    "kill_and_collect",
    "run_isolated",
    "start_python",
]
