"""Sets up the suites: TVM's idle threads, the meaning of the options, and the tables after a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.compiler.targets import TARGETS
from harness.compiler.tuned.database import open_database
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.files import make_folder
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processes.threads import SPIN_VARIABLE
from harness.core.processors import chosen_processors
from perf.answering import Errors, Side, answering_sides, measure, named_case
from perf.keeping import KEPT, conditions, keep, kept_before
from perf.measuring import SPIN_COUNT
from perf.options import Options
from perf.peers import PEERS, peers_of
from perf.shifts import Comparison, checked, compare_runs

Results = list[dict[str, Any]]

KERNELS = pytest.StashKey[Results]()
COMPONENTS = pytest.StashKey[Results]()
ROPE = pytest.StashKey[Results]()
END_TO_END = pytest.StashKey[Results]()
SCALING = pytest.StashKey[Results]()
COMPARED = pytest.StashKey[dict[str, Sequence[Comparison] | HarnessError]]()
"""By stored run: how this one compares with it, or why it cannot be compared."""


@pytest.fixture(scope="session")
def options(request: pytest.FixtureRequest) -> Options:
    """Which sides are measured, and for how long."""
    return options_of(request.config)


def options_of(config: pytest.Config) -> Options:
    database = config.getoption("db")
    return Options(
        Path(database) if database else None,
        config.getoption("untuned"),
        tuple(PEERS) if config.getoption("peers") else tuple(config.getoption("peer")),
        config.getoption("rounds"),
        chosen_processors(config.getoption("cpu"), config.getoption("cuda_arch")),
        tuple(map(Path, config.getoption("budget"))),
    )


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> Case:
    """The whole model that a suite asks what its `ASKED` says."""
    return named_case(request.module.ASKED.subject, request.config)


@pytest.fixture(scope="module")
def answering(
    request: pytest.FixtureRequest, whole: Case, options: Options
) -> Iterator[tuple[dict[str, Side], Errors]]:
    """Its sides, and peers that cannot be measured."""
    with answering_sides(request.module.ASKED, whole, options) as found:
        yield found


@pytest.fixture(scope="module")
def sides(answering: tuple[dict[str, Side], Errors]) -> dict[str, Side]:
    """Its sides, which were asked the first question."""
    return answering[0]


@pytest.fixture
def ask(
    request: pytest.FixtureRequest,
    whole: Case,
    answering: tuple[dict[str, Side], Errors],
    options: Options,
    benchmark: Any,
    end_to_end_results: Results,
) -> Callable[..., None]:
    """Times one question on all sides and keeps the result: `ask(question, seconds)`, see `perf.answering.measure`."""

    def time_and_keep(question: str, budget: float, *, check: bool = False) -> None:
        result = measure(question, request.module.ASKED, *answering, whole, options, benchmark, budget, check)
        end_to_end_results.append(result)

    return time_and_keep


@pytest.fixture
def kernel_results(request: pytest.FixtureRequest) -> Results:
    """The list that each kernel's numbers are added to; pytest-benchmark saves the same as extra information."""
    return request.config.stash[KERNELS]


@pytest.fixture
def component_results(request: pytest.FixtureRequest) -> Results:
    """The list that each component's numbers are added to."""
    return request.config.stash[COMPONENTS]


@pytest.fixture
def rope_results(request: pytest.FixtureRequest) -> Results:
    """The list that the strategies' numbers are added to."""
    return request.config.stash[ROPE]


@pytest.fixture
def end_to_end_results(request: pytest.FixtureRequest) -> Results:
    """The list that the whole model's numbers are added to."""
    return request.config.stash[END_TO_END]


@pytest.fixture
def scaling_results(request: pytest.FixtureRequest) -> Results:
    """The list that each component's model of scaling is added to."""
    return request.config.stash[SCALING]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)  # read when the pool starts
    config.option.benchmark_quiet = (
        True  # its table has neither PyTorch nor the peak; --benchmark-verbose brings it back
    )
    stored = config.getoption("benchmark_compare")
    if isinstance(stored, str) and stored.endswith(".json") and not Path(stored).is_file():
        raise pytest.UsageError(f"cannot compare with {stored}: there is no such file, give one of --benchmark-json")
    if (rounds := config.getoption("rounds")) is not None and rounds < 1:
        raise pytest.UsageError(f"cannot measure {rounds} rounds: give --rounds 1 or more")
    unknown = [name for name in config.getoption("peer") if name not in PEERS]
    if unknown:
        raise pytest.UsageError(f"Unknown peer {unknown[0]!r}: known are {', '.join(PEERS)}.")
    precisions = config.getoption("precision") or [DEFAULT_PRECISION]
    targets = config.getoption("target") or list(TARGETS)
    for name in config.getoption("peer"):
        if not any(peers_of(*kind, [name]) for kind in itertools.product(precisions, targets)):
            peer = PEERS[name]
            precision = f" --precision {peer.precision}" if peer.precision else ""
            raise pytest.UsageError(f"{name!r} is measured beside other cases: add --target {peer.target}{precision}.")
    database = options_of(config).database
    if database is not None:
        try:
            open_database(database)
        except HarnessError as error:
            raise pytest.UsageError(str(error)) from error
    if (folder := config.getoption("keep")) is not None:
        try:
            make_folder(folder)
        except HarnessError as error:
            raise pytest.UsageError(str(error)) from error
        config.stash[KEPT] = conditions(config)
    for key in (KERNELS, COMPONENTS, ROPE, END_TO_END, SCALING):
        config.stash[key] = []
    config.stash[COMPARED] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what `--keep` holds already, before any fixture is made."""
    if when := kept_before(item):
        pytest.skip(f"measured before, {when}: {item.config.getoption('keep')} holds it")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call" and report.passed:
        try:
            keep(item)
        except HarnessError as error:
            report.outcome, report.longrepr = "failed", str(error)
    return report


def pytest_report_header(config: pytest.Config) -> list[str]:
    options = options_of(config)
    database = options.database_for("llvm")
    if database is None:
        return ["schedules: the default ones"]
    return [
        f"schedules: those of {database}, the default ones otherwise",
        *open_database(database).notices(options.processors),
    ]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Compares with a stored run, if that is wanted; a slowdown fails the run."""
    config = session.config
    benchmarks: Any = config._benchmarksession  # type: ignore[attr-defined]
    if not benchmarks.compare:
        return
    after = {benchmark.fullname: benchmark.extra_info for benchmark in benchmarks.benchmarks if benchmark}
    found: dict[str, Sequence[Comparison] | HarnessError] = {}
    for path, stored in benchmarks.compared_mapping.items():
        before = {name: benchmark.get("extra_info", {}) for name, benchmark in stored.items()}
        try:
            found[str(path)] = checked(compare_runs(before, after), str(path))
        except HarnessError as error:
            found[str(path)] = error
    if not found:
        wanted = "the last one" if benchmarks.compare is True else benchmarks.compare
        found[str(wanted)] = HarnessError(f"cannot compare: there is no stored run {wanted} that can be read")
    config.stash[COMPARED] = found
    if any(isinstance(c, HarnessError) or any(one.is_slowdown for one in c) for c in found.values()):
        session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from perf import tables
    from perf.scaling_tables import draw_all, scaling_tables

    if (scaled := config.stash[SCALING]) and (picture := config.getoption("scaling_plot")):
        draw_all(scaled, picture)
    suites: dict[pytest.StashKey[Results], Callable[[Results], str]] = {
        KERNELS: tables.kernel_tables,
        COMPONENTS: tables.component_tables,
        ROPE: tables.rope_tables,
        END_TO_END: tables.end_to_end_table,
        SCALING: scaling_tables,
    }
    for key, render in suites.items():
        if results := config.stash[key]:
            terminalreporter.write_line(render(results))
    for stored, compared in config.stash[COMPARED].items():
        if isinstance(compared, HarnessError):
            terminalreporter.write_line(f"error: {compared}", red=True)
        else:
            terminalreporter.write_line(tables.comparison_table(compared, stored))
