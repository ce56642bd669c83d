"""Runs functions in isolated processes, so that a crash, a hang or a memory hog ends one call and never the run.

Each call is a process in its own process group: a fresh interpreter, or, if many calls need the same libraries, a fork
of a process that has loaded them once (`Template`). Parent and child exchange files in a private folder, because a file
survives a native crash of the process that wrote it:

    request        pickled: the function and its arguments; written before the child starts
    breadcrumbs    one line per stage, written by the child when it enters the stage
    output         stdout and stderr of the child and its children
    answer         pickled: a `WorkerResult`, or the error for the user; absent if the child died
    alive          a pipe, of forks only: end of file tells the child that the parent is gone
    ended          the exit code, of forks only, written by the template, because the parent does not see a fork end

Memory is limited by polling the resident set of the child and its descendants. RLIMIT_AS would be sharper, but torch
and TVM reserve tens of times the address space that they use, and macOS does not enforce it.
"""
