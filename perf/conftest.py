"""The suite's surroundings: how TVM's threads idle, and the tables after a run."""

from __future__ import annotations

import os
from typing import Any

import pytest

from perf.measuring import SPIN_COUNT, SPIN_VARIABLE

Results = list[dict[str, Any]]

KERNELS = pytest.StashKey[Results]()
COMPONENTS = pytest.StashKey[Results]()
ROPE = pytest.StashKey[Results]()
END_TO_END = pytest.StashKey[Results]()


@pytest.fixture
def kernel_results(request: pytest.FixtureRequest) -> Results:
    """Where each kernel's numbers go, the same that pytest-benchmark saves as extra information."""
    return request.config.stash[KERNELS]


@pytest.fixture
def component_results(request: pytest.FixtureRequest) -> Results:
    """Where each component's numbers go."""
    return request.config.stash[COMPONENTS]


@pytest.fixture
def rope_results(request: pytest.FixtureRequest) -> Results:
    """Where the strategies' numbers go."""
    return request.config.stash[ROPE]


@pytest.fixture
def end_to_end_results(request: pytest.FixtureRequest) -> Results:
    """Where the whole model's numbers go."""
    return request.config.stash[END_TO_END]


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)  # read when the pool starts
    config.option.benchmark_quiet = (
        True  # its table has neither PyTorch nor the peak; --benchmark-verbose brings it back
    )
    config.stash[KERNELS] = []
    config.stash[COMPONENTS] = []
    config.stash[ROPE] = []
    config.stash[END_TO_END] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from perf import tables

    for results, render in (
        (config.stash[KERNELS], tables.kernel_tables),
        (config.stash[COMPONENTS], tables.component_table),
        (config.stash[ROPE], tables.rope_tables),
        (config.stash[END_TO_END], tables.end_to_end_table),
    ):
        if results:
            terminalreporter.write_line(render(results))
