"""What this machine can compile and run, with which CPU features and threads, and which versions do not go together.

Whatever loads native code is asked in a worker process: a pair of packages that crashes is a finding, not the end.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from harness.processes.threads import OPTION_VARIABLE, reason, thread_count
from harness.runtime.threads import VARIABLE, usable_cpus

MISSING = "missing"
"""Condition of a package that is not installed."""

_PROBE_SECONDS = 120.0


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        topic: What it is about.
        text: What was found.
        problem: Whether something is wrong that the user should mend; a target that this machine lacks is not.
        fix: What to do about a problem.
    """

    topic: str
    text: str
    problem: bool = False
    fix: str = ""


@dataclass(frozen=True)
class KnownBad:
    """A combination of versions that is known not to work.

    Attributes:
        when: Condition by package, all of which must hold: a version range as in a requirement (`>=0.27,<0.28`),
            `missing`, `+cpu` for a version with that local label, or `+` for one without any.
        what: What goes wrong.
        fix: What to do.
    """

    when: Mapping[str, str]
    what: str
    fix: str


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        {"apache-tvm": ">=0.27,<0.28", "apache-tvm-ffi": ">=0.1.15"},
        "structural hashing crashes the process in MetaSchedule's search and DLight's tensorized matrix products",
        "pip install 'apache-tvm-ffi<0.1.15'",
    ),
    KnownBad(
        {"torch": "+cpu", "torchvision": "+"},
        "torchvision's operators are built for the CUDA build of torch and cannot load beside a CPU-only one",
        "install both from PyPI, or both from PyTorch's CPU index",
    ),
    KnownBad(
        {"sam3": ">=0.1.4", "psutil": MISSING},
        "sam3 imports psutil without requiring it",
        "pip install psutil",
    ),
    KnownBad(
        {"sam3": ">=0.1.4", "open_clip_torch": MISSING},
        "the sam3 wheel lacks the vocabulary that its text encoder opens",
        "pip install open_clip_torch, which carries the same file",
    ),
    KnownBad(
        {"torch": ">=0", "torchvision": MISSING},
        "sam3 needs torchvision beside torch",
        "pip install 'sam3-tvm[verify]'",
    ),
    KnownBad(
        {"torch": ">=0", "sam3": MISSING},
        "sam3 is not installed: nothing can be verified",
        "pip install 'sam3-tvm[verify]'",
    ),
    KnownBad(
        {"sam3": ">=0", "numpy": ">=2.4"},
        "sam3 asks for NumPy below 2.4",
        "pip install 'numpy<2.4'",
    ),
)
"""Every combination known to fail; a new one is one entry here."""

PACKAGES = (
    "apache-tvm",
    "apache-tvm-ffi",
    "numpy",
    "torch",
    "torchvision",
    "sam3",
    "open_clip_torch",
    "psutil",
    "triton",
)
"""Whose versions matter."""


def installed_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of those of the packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def known_bad(versions: Mapping[str, str], table: Sequence[KnownBad] = KNOWN_BAD) -> tuple[KnownBad, ...]:
    """The entries of the table that hold for the installed versions."""
    return tuple(
        entry for entry in table if all(_holds(name, condition, versions) for name, condition in entry.when.items())
    )


def _holds(name: str, condition: str, versions: Mapping[str, str]) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    version = versions.get(name)
    if version is None or condition == MISSING:
        return version is None and condition == MISSING
    if condition.startswith("+"):
        return version.partition("+")[2] == condition[1:]
    try:
        return SpecifierSet(condition).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def diagnose() -> list[Finding]:
    """Everything that there is to tell about this machine and this installation."""
    versions = installed_versions()
    findings = [*_machine(), *_versions(versions)]
    bad = known_bad(versions)
    findings += [
        Finding(
            "versions",
            f"{', '.join(_named(name, versions) for name in entry.when)}: {entry.what}",
            problem=True,
            fix=entry.fix,
        )
        for entry in bad
    ]
    if "apache-tvm" in versions:
        findings += probed("TVM", "harness.cli.doctor:probe_tvm", _tvm_findings)
    else:
        findings.append(
            Finding("TVM", "not installed: compiled models for this machine bring TVM's runtime library along")
        )
    if "torch" in versions:
        findings += probed("PyTorch", "harness.cli.doctor:probe_torch", _torch_findings)
    else:
        findings.append(
            Finding(
                "PyTorch",
                "not installed: this is the base installation, which runs compiled models; "
                "to verify and compile, pip install 'sam3-tvm[verify]'",
            )
        )
    return findings


def render(findings: Sequence[Finding]) -> Any:
    """A table for the terminal (rich), problems marked and each with its fix."""
    from rich.table import Table
    from rich.text import Text

    table = Table("", "topic", "finding", show_lines=False, highlight=False)
    for finding in findings:
        text = finding.text + (f"\nfix: {finding.fix}" if finding.fix else "")
        style = "red" if finding.problem else ""
        table.add_row(Text("!" if finding.problem else "", style=style), finding.topic, Text(text, style=style))
    return table


def probe_tvm(_: None, enter: Callable[[str], None]) -> dict[str, Any]:
    """In a worker: what TVM can do here. A crash is told by the stage it happened in."""
    enter("import tvm")
    import tvm
    from tvm.target import codegen

    from harness.runtime.cpu import VECTOR_FEATURES
    from harness.targets import TARGETS
    from harness.targets.llvm import host_cpu

    enter("MetaSchedule's TuneContext")  # what crashes with a mismatched apache-tvm-ffi
    _make_tune_context()
    enter("targets")
    cpu = host_cpu()
    promised = codegen.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": cpu}))
    return {
        "llvm": codegen.llvm_version_major(allow_none=True),
        "host_cpu": codegen.llvm_get_system_cpu(),
        "cpu": cpu,
        "features": [feature for feature in VECTOR_FEATURES if feature in promised],
        "targets": {name: (target.compile_problem(), target.run_problem()) for name, target in TARGETS.items()},
    }


def _make_tune_context() -> None:
    import tvm
    from tvm import te
    from tvm.s_tir import meta_schedule

    from harness.cli.tensor_intrinsics import import_tensor_intrinsics

    import_tensor_intrinsics()
    source = te.placeholder((4,), name="source")
    function = te.create_prim_func([source, te.compute((4,), lambda i: source[i] + 1, name="result")])
    meta_schedule.TuneContext(
        mod=tvm.IRModule({"main": function}),
        target=tvm.target.Target({"kind": "llvm", "num-cores": 1}),
        space_generator="post-order-apply",
    )


def probe_threads(count: int | None, enter: Callable[[str], None]) -> int:
    """In a worker: how many threads a parallel loop of TVM really runs on, by itself or when told to use `count`."""
    from harness.processes.threads import configure_threads, tvm_threads

    if count is None:
        os.environ.pop(VARIABLE, None)
    else:
        configure_threads(count)
    return tvm_threads()


def probe_torch(_: None, enter: Callable[[str], None]) -> dict[str, Any]:
    """In a worker: whether torch and torchvision load, and run one operator of torchvision's own."""
    enter("import torch")
    import torch

    enter("import torchvision")
    import torchvision

    enter("torchvision.ops.nms")
    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return {"cuda": torch.cuda.is_available(), "threads": torch.get_num_threads()}


def _machine() -> list[Finding]:
    import psutil

    from harness.runtime.cpu import VECTOR_FEATURES, cpu_features, cpu_model
    from harness.targets.linking import linker

    present = cpu_features() or frozenset()
    features = " ".join(feature for feature in VECTOR_FEATURES if feature in present) or "not told by the system"
    command = linker(for_macos=platform.system() == "Darwin")
    return [
        Finding("machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        Finding("machine", f"{psutil.virtual_memory().total / 2**30:.1f} GiB of memory"),
        Finding("CPU", f"{cpu_model()}, {usable_cpus()} CPUs usable by this process"),
        Finding("CPU", f"features: {features}"),
        Finding("linker", " ".join(command) if command else "none, so nothing can be compiled"),
    ]


def _versions(versions: Mapping[str, str]) -> list[Finding]:
    return [Finding("versions", ", ".join(_named(name, versions) for name in PACKAGES))]


def _named(name: str, versions: Mapping[str, str]) -> str:
    return f"{name} {versions.get(name, 'not installed')}"


def probed(topic: str, function: str, tell: Callable[[Any], list[Finding]]) -> list[Finding]:
    """What `tell` makes of the answer of a probe in a worker, or the one problem that the probe died.

    Args:
        topic: Of the problem.
        function: The probe, as `module:name`, taking None and `enter`.
        tell: Takes what the probe returned.
    """
    from harness.processes import WorkerEnd, run_isolated

    result = run_isolated(function, None, timeout=_PROBE_SECONDS)
    if result.kind is WorkerEnd.OK:
        return tell(result.value)
    message = result.error.message if result.error else result.kind.value
    where = f" in {result.stage!r}" if result.stage and result.stage not in message else ""
    return [
        Finding(
            topic,
            f"{result.kind.value}{where}: {message}",
            problem=True,
            fix="install the versions in constraints.txt: make clean setup",
        )
    ]


def _tvm_findings(probe: Mapping[str, Any]) -> list[Finding]:
    from harness.targets import TARGETS

    findings = [
        Finding("TVM", f"LLVM {probe['llvm']}, compiles for {probe['cpu']} with {' '.join(probe['features'])}"),
        *_thread_findings(),
    ]
    if probe["cpu"] != probe["host_cpu"]:
        findings.append(
            Finding(
                "TVM",
                f"LLVM takes this processor for {probe['host_cpu']}; SAM3_TVM_MCPU or features that the system hides "
                f"made it {probe['cpu']}",
            )
        )
    for name, (compile_problem, run_problem) in probe["targets"].items():
        compiles = f"cannot compile: {compile_problem}" if compile_problem else "compiles"
        runs = f"cannot run: {run_problem}" if run_problem else "runs"
        # the CPU is the one target that every machine must have
        needed = name == "llvm"
        text = f"{compiles}; {runs}; precisions: {', '.join(TARGETS[name].precisions)}"
        findings.append(Finding(f"target {name}", text, problem=needed and bool(compile_problem)))
    return findings


def _thread_findings() -> list[Finding]:
    from harness.processes import run_isolated

    count = thread_count()
    by_itself = run_isolated("harness.cli.doctor:probe_threads", None, timeout=_PROBE_SECONDS).value
    told = run_isolated("harness.cli.doctor:probe_threads", count, timeout=_PROBE_SECONDS).value
    findings = [
        Finding(
            "threads", f"a run uses {count} of {usable_cpus()} usable CPUs: {reason()}; --threads sets another number"
        ),
        Finding(
            "threads",
            f"a parallel loop really runs on {told} threads when sam3-tvm sets {VARIABLE}, "
            f"on {by_itself} when TVM counts by itself",
            problem=told != count,
        ),
    ]
    ignored = [f"{name}={os.environ[name]}" for name in (VARIABLE, "OMP_NUM_THREADS") if os.environ.get(name)]
    if ignored:
        text = (
            f"{' and '.join(ignored)} of the environment are set anew in every run: use --threads or {OPTION_VARIABLE}"
        )
        findings.append(Finding("threads", text))
    return findings


def _torch_findings(probe: Mapping[str, Any]) -> list[Finding]:
    device = "sees a CUDA device" if probe["cuda"] else "sees no CUDA device"
    return [Finding("PyTorch", f"torch and torchvision load and run together; {device}; {probe['threads']} threads")]


if __name__ == "__main__":
    from rich.console import Console

    _findings = diagnose()
    Console().print(render(_findings))
    sys.exit(any(finding.problem for finding in _findings))
