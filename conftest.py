"""Options, markers and parametrization: the conformance suite runs the same cases as `sam3-tvm verify`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.targets import HOST, TARGETS
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, WEIGHTS, Case, Scale, Weights
from harness.core.errors import HarnessError
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.core.processes.memory import keep_freed_memory
from harness.core.processes.threads import OPTION_VARIABLE, configure_threads, share_cpus
from harness.core.processors import CPU_VARIABLE, CUDA_VARIABLE, Remote, chosen_processors
from harness.core.settings import Settings
from harness.models.registry import subjects
from harness.models.selection import select
from harness.runtime.errors import ModelError
from harness.runtime.sam3.description import SAM_3_1

pytest_plugins = ["conformance.layers", "conformance.skips"]

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
# Every night: other examples each time, and more of them (conformance/support/examples.py).
settings.register_profile(
    "explore",
    derandomize=False,  # as it is on a server for continuous integration, if nothing is said
    deadline=None,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
)
settings.load_profile("deterministic")

MARKERS = {
    **{name: f"cases of target {name}" for name in TARGETS},
    **{name: f"cases of component {name}" for name in subjects()},
    **{name: f"cases of strategy {name}" for name in STRATEGIES},
    **{scale.value: f"cases at {scale.value} scale" for scale in Scale},
    **{name: f"cases in {name}" for name in PRECISIONS},
    **{name: f"cases with {name} weights" for name in WEIGHTS},
}

NAMES_OF_CASES = ("component", "strategy", "target", "scale", "precision", "frontend", "weights")
"""The options that say which cases to run."""

SMOKE = {
    Case(component, DEFAULT_STRATEGY, HOST.name)
    for component in ("box_head", "scoring_head", "text_encoder", "geometry_encoder")
}
"""The cases that `make smoke` verifies: components that take seconds."""

CASES = pytest.StashKey[tuple[Case, ...]]()
SETTINGS = pytest.StashKey[Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sam3-tvm", "which cases of the conformance suite to run; repeat a flag for several values")
    for flag, known in (("component", subjects()), ("strategy", STRATEGIES), ("target", TARGETS)):
        group.addoption(f"--{flag}", action="append", default=[], help=f"one of {', '.join(known)}; default: all")
    group.addoption(
        "--scale", action="append", default=[], help=f"one of {', '.join(Scale)}; default: {Scale.SHALLOW.value}"
    )
    group.addoption(
        "--precision",
        action="append",
        default=[],
        help=f"one of {', '.join(PRECISIONS)}; default: {DEFAULT_PRECISION}",
    )
    group.addoption(
        "--frontend", action="append", default=[], help=f"one of {', '.join(FRONTENDS)}; default: {DEFAULT_FRONTEND}"
    )
    group.addoption(
        "--weights", action="append", default=[], help=f"one of {', '.join(WEIGHTS)}; default: {Weights.SEEDED}"
    )
    group.addoption("--seed", type=int, default=0, help="seed of the weights; default: 0")
    group.addoption(
        "--threads",
        type=int,
        default=os.environ.get(OPTION_VARIABLE) or None,
        help=f"threads of TVM and PyTorch in every process; default: {OPTION_VARIABLE}, or what doctor tells",
    )
    group.addoption(
        "--cpu", metavar="NAME", help=f"CPU to compile for, as LLVM names it; default: {CPU_VARIABLE} or this one"
    )
    group.addoption(
        "--cuda-arch",
        metavar="sm_NN",
        help=f"NVIDIA architecture to compile for; default: {CUDA_VARIABLE} or several",
    )
    group.addoption("--db", metavar="DIR", help="tuning database; default: the one in fixtures/tuned that fits")
    group.addoption("--untuned", action="store_true", help="leave out what tuning found")
    group.addoption("--peers", action="store_true", help="perf: the peers as well, see perf/peers.py")
    group.addoption("--peer", action="append", default=[], help="perf: only this one of them; repeat for several")
    group.addoption("--rounds", type=int, help="perf: rounds of each case; default: as many as its budget allows")
    group.addoption(
        "--budget",
        metavar="FILE",
        action="append",
        default=[],
        help="perf: budget of a component, which says what stays float32 in its half precision; repeat for several",
    )
    group.addoption(
        "--keep",
        metavar="FOLDER",
        type=Path,
        help="perf: write what is measured to this folder, a file for each benchmark, and skip what it holds already",
    )
    group.addoption(
        "--scaling-plot", metavar="FILE", type=Path, help="perf: draw what perf/test_scaling.py finds, as PNG"
    )
    group.addoption("--remote", metavar="HOST:PORT", help="run the cases on this device, see sam3-tvm serve-device")
    group.addoption(
        "--aarch64",
        action="store_true",
        help="run the CPU kernels on AArch64, emulated on any other machine; --cpu names another CPU than Neoverse N1",
    )
    group.addoption(
        "--require-target", action="append", default=[], help="fail instead of skip where this target cannot run"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        # xdist's workers inherit both.
        share_cpus()
        keep_freed_memory()
    for name, description in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {description}")
    unknown = [name for name in config.getoption("require_target") if name not in TARGETS]
    if unknown:
        raise pytest.UsageError(f"Unknown target {unknown[0]!r} in --require-target: known are {', '.join(TARGETS)}.")
    config.stash[CASES] = selected_cases(config)
    config.stash[SETTINGS] = chosen_settings(config)
    if (threads := config.getoption("threads")) is not None:
        try:
            configure_threads(threads)
        except HarnessError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str:
    remote = config.stash[SETTINGS].remote
    where = "" if remote is None else f", cases run on {remote}"
    profile = settings.get_current_profile_name()
    return f"sam3-tvm: seed {config.getoption('seed')}, hypothesis {profile}{where}"


def chosen_settings(config: pytest.Config) -> Settings:
    """Seeded weights, the device that the command line names, and the processors: its own, otherwise the device's.

    Raises:
        pytest.UsageError: There is no such device.
    """
    processors, remote = chosen_processors(config.getoption("cpu"), config.getoption("cuda_arch")), None
    try:
        if (address := config.getoption("remote")) is not None:
            from harness.compiler.execution.remote.client import describe_remote

            remote = Remote(address)
            processors = processors.with_defaults(describe_remote(remote).processors)
    except (HarnessError, ModelError) as error:
        raise pytest.UsageError(str(error)) from error
    return Settings(remote=remote, processors=processors)


@pytest.fixture(scope="session")
def verification_settings(request: pytest.FixtureRequest) -> Settings:
    """Seeded weights, and the device and processors that the command line names."""
    return request.config.stash[SETTINGS]


def selected_cases(config: pytest.Config) -> tuple[Case, ...]:
    """The cases that the command line asks for.

    Raises:
        pytest.UsageError: If a name is unknown.
    """
    try:
        return select(
            config.getoption("component"),
            config.getoption("strategy"),
            config.getoption("target"),
            config.getoption("scale") or [Scale.SHALLOW.value],
            config.getoption("seed"),
            config.getoption("precision") or [DEFAULT_PRECISION],
            config.getoption("frontend") or [DEFAULT_FRONTEND],
            config.getoption("weights") or [Weights.SEEDED.value],
        )
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error


def whole_cases(config: pytest.Config) -> tuple[Case, ...]:
    """The cases of whole models that the command line asks for; only the default strategy unless one is named.

    A test module that asks for one of them names the subject that it is about as `SUBJECT`.
    """
    components = config.getoption("component")
    weights = config.getoption("weights") or [Weights.SEEDED.value]
    whole = [
        name
        for name, subject in subjects().items()
        if subject.whole and (not components or name in components) and not set(weights).isdisjoint(subject.weights)
    ]
    if not whole:
        return ()
    return select(
        whole,
        config.getoption("strategy") or [DEFAULT_STRATEGY],
        config.getoption("target"),
        config.getoption("scale") or [Scale.SHALLOW.value],
        config.getoption("seed"),
        config.getoption("precision") or [DEFAULT_PRECISION],
        config.getoption("frontend") or [DEFAULT_FRONTEND],
        weights,
    )


def parameter(case: Case, *others: str) -> object:
    """A case with its id and its markers, and other parameters, of which the id has those that are not empty."""
    names = [case.component, case.strategy, case.target, case.scale, case.precision, case.weights]
    names += ["wide"] if is_wide(case) else []
    names += ["smoke"] if case in SMOKE else []
    marks = [getattr(pytest.mark, name) for name in names]
    return pytest.param(case, *others, id="-".join([case.id, *filter(None, others)]), marks=marks)


def is_wide(case: Case) -> bool:
    """Returns whether a case is for every night alone, because cheaper tests see its faults.

    Every output of `vision_backbone` is one of `image_encoder`, computed alike, and so is what `vit` computes.
    `test_rope*.py` hold each strategy on smaller programs; `memory_attention` keeps the control.
    `conformance/models/sam31` holds each entry point of a compiled SAM 3.1 to PyTorch, and its modules to mlx-vlm's.
    """
    strategies = (DEFAULT_STRATEGY, *(("none",) if case.component == "memory_attention" else ()))
    if case.component in ("vit", "vision_backbone") or case.strategy not in strategies:
        return True
    return subjects()[case.component].model == SAM_3_1 and not subjects()[case.component].whole


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    if "case" in metafunc.fixturenames:
        cases = [case for case in config.stash[CASES] if not subjects()[case.component].whole]
        metafunc.parametrize("case", [parameter(case) for case in cases])
    if "measured_case" in metafunc.fixturenames:
        strategies = config.getoption("strategy") or [DEFAULT_STRATEGY]  # each takes as long as the others
        parts = [case for case in config.stash[CASES] if not subjects()[case.component].whole]
        cases = [case for case in parts if case.strategy in strategies]
        if "measured_sample" in metafunc.fixturenames:
            # The module names the samples of a component that are measured besides its main one.
            samples = {case: ("", *metafunc.module.SAMPLES.get(case.component, ())) for case in cases}
            pairs = [parameter(case, sample) for case in cases for sample in samples[case]]
            metafunc.parametrize(("measured_case", "measured_sample"), pairs)
        else:
            metafunc.parametrize("measured_case", [parameter(case) for case in cases])
    if "whole_case" in metafunc.fixturenames:
        cases = [case for case in whole_cases(config) if case.component == metafunc.module.SUBJECT]
        metafunc.parametrize("whole_case", [parameter(case) for case in cases])
    if "whole_fp32_case" in metafunc.fixturenames:
        cases = [case for case in whole_cases(config) if case.component == metafunc.module.SUBJECT]
        metafunc.parametrize(
            "whole_fp32_case", [parameter(case) for case in cases if case.precision == DEFAULT_PRECISION]
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what has no case where an option names cases; benchmarks read those options themselves."""
    if not any(config.getoption(name) for name in NAMES_OF_CASES):
        return
    benchmarks = config.rootpath / "perf"
    others = [item for item in items if not (has_case(item) or item.path.is_relative_to(benchmarks))]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def has_case(item: pytest.Item) -> bool:
    """Whether a case is among the parameters of a test."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return any(isinstance(value, Case) for value in parameters.values())
