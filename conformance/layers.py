"""Divides the suite into layers by cost: the tests of each, the limit of a test, and the files that start first."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = {
    "law": (30, "neither a model nor a build of TVM"),
    "kernel": (120, "a few kernels, compiled and run"),
    "part": (300, "a component: exported, compiled, judged or diagnosed"),
    "model": (900, "a whole shallow model, its folder, or the commands that use one"),
    "wide": (3600, "what `make test` leaves to `make test-all`: dear, and seen by cheaper tests but for rare faults"),
}
"""The CPU seconds that a test may take in each layer, several times what one takes on a slow CPU, and what a layer has.

They are those of the test's process and of the processes that it waited for, so that other work does not count.
"""

FOLDERS = {
    "kernel": ("aarch64", "schedules", "targets", "tuned", "tuning"),
    "part": ("budget", "diagnose", "execution", "explain", "lowering", "verify"),
    "model": ("cli", "deployment", "models", "perf", "processes", "runtime", "segment", "serve", "track", "ui"),
}
"""The folders whose tests have a layer of their own unless they are marked with another; other tests are laws."""

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds that each file took; `--record-durations` writes it."""
PROPERTY = "layer"
"""By that name a report says which layer its test is of, in JUnit's file as well."""
LONG = 60
"""Seconds from which on a file is one of those that start first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("sam3-tvm").addoption(
        "--record-durations", action="store_true", help=f"write to {DURATIONS.name} how long each file took"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, (_, description) in LAYERS.items():
        config.addinivalue_line("markers", f"{name}: {description}")
    config.addinivalue_line("markers", "smoke: one test of each kind, which `make smoke` runs beside all laws")
    config.pluginmanager.register(Durations(), "layer-durations")


def layer_of(item: pytest.Item | pytest.Module) -> str | None:
    """Returns the layer that the nearest marker of a test or its file names, or its folder's; None for a benchmark."""
    for marker in item.iter_markers():
        if marker.name in LAYERS:
            return marker.name
    if not item.path.is_relative_to(DURATIONS.parent):
        return None
    folder = item.path.relative_to(DURATIONS.parent).parts[0]
    return next((layer for layer, folders in FOLDERS.items() if folder in folders), "law")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its layer, before `-m` selects.

    Where processes share the files, those that take longest come first: whoever got one of them last would work on it
    alone. The others stay in order: neighbours share models.
    """
    for item in items:
        if (layer := layer_of(item)) is not None:
            item.add_marker(layer)
            item.user_properties.append((PROPERTY, layer))
    if not hasattr(config, "workerinput"):
        return
    long = {file: seconds for file, seconds in recorded().items() if seconds >= LONG}
    items.sort(key=lambda item: -long.get(file_of(item.nodeid), 0))


def recorded() -> dict[str, int]:
    """Returns the seconds that each file took when it was recorded."""
    known: dict[str, int] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return known


def file_of(nodeid: str) -> str:
    """Returns the path of a test's file, relative to the root."""
    return nodeid.partition("::")[0]


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a test that passes, and costs more than its layer allows."""
    before = cpu_seconds()
    yield
    layer = layer_of(item)
    if layer is not None and (taken := cpu_seconds() - before) > LAYERS[layer][0]:
        pytest.fail(
            f"It took {taken:.0f} CPU seconds, and the layer `{layer}` allows {LAYERS[layer][0]}: "
            f"make it cheaper, or mark it with another layer of {', '.join(LAYERS)}.",
            pytrace=False,
        )


class Durations:
    """Adds up how long tests took, in the process that reports them."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.layers: dict[str, Counter[str]] = {layer: Counter() for layer in LAYERS}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files[file_of(report.nodeid)] += report.duration
        if layer := dict(report.user_properties).get(PROPERTY):
            self.layers[str(layer)]["seconds"] += report.duration
            self.layers[str(layer)]["tests"] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        taken = [f"{name} {found['tests']} in {found['seconds']:.0f} s" for name, found in self.layers.items() if found]
        terminalreporter.write_line(f"layers: {', '.join(taken)}")
        if config.getoption("record_durations"):
            known = recorded() | {file: round(seconds) for file, seconds in self.files.items()}
            DURATIONS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
