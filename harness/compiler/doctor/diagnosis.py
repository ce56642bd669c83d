"""Diagnoses this machine: targets, CPU features, threads, and incompatible versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from harness.compiler.doctor.known_bad import PACKAGES, known_bad
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.targets.linking import linker
from harness.core.machine import control_group
from harness.core.machine import versions as installed_versions
from harness.core.processes.call import WorkerEnd, run_isolated
from harness.core.processes.threads import OPENMP_VARIABLE, OPTION_VARIABLE, thread_count, thread_count_reason
from harness.core.processors import CPU_VARIABLE, THIS_MACHINE, Processors
from harness.runtime.cores import cores
from harness.runtime.cpu import (
    MATRIX_UNIT,
    VECTOR_FEATURES,
    cpu_features,
    cpu_model,
    has_integer_pairs,
    matrix_unit_problem,
)
from harness.runtime.threads import VARIABLE, cgroup_cpuset, cgroup_quota, usable_cpus

_PROBE_SECONDS = 120.0
_SHIFTS = "fp32 arithmetic on shifted halves, no instruction"
_INTEGERS = "16-bit integers that share scales, no instruction"


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        topic: Subject of the finding.
        text: The finding.
        problem: Whether the user should fix something; a target that this machine lacks is no problem.
        fix: Advice for a problem.
    """

    topic: str
    text: str
    problem: bool = False
    fix: str = ""


def diagnose(processors: Processors = THIS_MACHINE) -> list[Finding]:
    """Examines this machine and this installation.

    Args:
        processors: The processors to compile for.
    """
    versions = {name: version for name, version in installed_versions(PACKAGES).items() if version}
    findings = [*_machine(), Finding("versions", ", ".join(_label(name, versions) for name in PACKAGES))]
    known_bad_entries = known_bad(versions)
    findings += [
        Finding(
            "versions",
            f"{', '.join(_label(name, versions) for name in entry.conditions)}: {entry.problem}",
            problem=True,
            fix=entry.fix,
        )
        for entry in known_bad_entries
    ]
    if "apache-tvm" in versions:
        findings += run_probe("TVM", "harness.compiler.doctor.probes:probe_tvm", _tvm_findings, processors)
    else:
        findings.append(
            Finding("TVM", "not installed: compiled models for this machine bring TVM's runtime library along")
        )
    if "torch" in versions:
        findings += run_probe("PyTorch", "harness.compiler.doctor.probes:probe_torch", _torch_findings)
    else:
        findings.append(
            Finding(
                "PyTorch",
                "not installed: this is the base installation, which runs compiled models; "
                "to verify and compile, pip install 'sam3-tvm[verify]'",
            )
        )
    return findings


def _machine() -> list[Finding]:
    cpu_feature_set = cpu_features() or frozenset()
    features = (
        " ".join(feature for feature in VECTOR_FEATURES if feature in cpu_feature_set) or "not told by the system"
    )
    command = linker()
    return [
        Finding("machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"),
        Finding("machine", f"{psutil.virtual_memory().total / 2**30:.1f} GiB of memory"),
        Finding("CPU", f"{cpu_model()}, {usable_cpus()} CPUs usable by this process"),
        Finding("CPU", f"{cores()}; control group: {control_group(cgroup_cpuset(), cgroup_quota())}"),
        Finding("CPU", f"features: {features}"),
        Finding("CPU", bf16_products(cpu_feature_set, matrix_unit_problem)),
        Finding("linker", " ".join(command) if command else "none, so nothing can be compiled"),
    ]


def bf16_products(features: Collection[str], request_matrix_unit: Callable[[], str | None]) -> str:
    """Returns a sentence on the instructions that multiply bfloat16.

    Args:
        features: Features of the processor, in LLVM's spelling.
        request_matrix_unit: Requests the matrix unit of x86 from the system; returns why it is refused, or None.
    """
    if "neon" in features:
        return f"bf16: {'bfmmla and bfdot' if 'bf16' in features else _SHIFTS}"
    alternative = _INTEGERS if has_integer_pairs(features.__contains__) else _SHIFTS
    vectors = "vdpbf16ps" if "avx512bf16" in features else alternative
    if not set(MATRIX_UNIT).issubset(features):
        return f"bf16: {vectors}; no matrix unit (AMX)"
    refusal = request_matrix_unit()
    unit = f"refused, {refusal}" if refusal else "there, used with --cpu NAME+amx"
    return f"bf16: {vectors}; matrix unit (AMX) {unit}"


def _label(name: str, versions: Mapping[str, str]) -> str:
    return f"{name} {versions.get(name, 'not installed')}"


def run_probe(
    topic: str, function: str, to_findings: Callable[[Any], list[Finding]], *arguments: object
) -> list[Finding]:
    """Runs a probe in a worker; returns the findings of `to_findings`, or a problem if the worker died.

    Args:
        topic: Topic of the problem.
        function: The probe, as `module:name`; it takes the arguments and `on_stage`.
        to_findings: Converts the probe's result to findings.
        arguments: Arguments of the probe.
    """
    result = run_isolated(function, *arguments, timeout=_PROBE_SECONDS)
    if result.kind is WorkerEnd.OK:
        return to_findings(result.value)
    message = result.error.message if result.error else result.kind.value
    stage = f" in {result.stage!r}" if result.stage and result.stage not in message else ""
    return [
        Finding(
            topic,
            f"{result.kind.value}{stage}: {message}",
            problem=True,
            fix="install the versions in constraints.txt: make clean setup",
        )
    ]


def _tvm_findings(probe: Mapping[str, Any]) -> list[Finding]:
    findings = [
        Finding("TVM", f"LLVM {probe['llvm']}, compiles for {probe['cpu']} with {' '.join(probe['features'])}"),
        *_thread_findings(),
    ]
    if probe["cpu"] != probe["host_cpu"]:
        findings.append(
            Finding(
                "TVM",
                f"LLVM takes this processor for {probe['host_cpu']}; --cpu, {CPU_VARIABLE} or features that the system "
                f"hides made it {probe['cpu']}",
            )
        )
    for name, (compile_problem, run_problem) in probe["targets"].items():
        compiles = f"cannot compile: {compile_problem}" if compile_problem else "compiles"
        runs = f"cannot run: {run_problem}" if run_problem else "runs"
        is_host = name == HOST.name
        text = f"{compiles}; {runs}; precisions: {', '.join(TARGETS[name].precisions)}"
        findings.append(Finding(f"target {name}", text, problem=is_host and bool(compile_problem)))
    return findings


def _thread_findings() -> list[Finding]:
    count = thread_count()
    default_count = run_isolated("harness.compiler.doctor.probes:probe_threads", None, timeout=_PROBE_SECONDS).value
    actual = run_isolated("harness.compiler.doctor.probes:probe_threads", count, timeout=_PROBE_SECONDS).value
    findings = [
        Finding(
            "threads",
            f"a run uses {count} of {usable_cpus()} usable CPUs: {thread_count_reason()}; "
            "--threads sets another number",
        ),
        Finding(
            "threads",
            f"a parallel loop really runs on {actual} threads when sam3-tvm sets {VARIABLE}, "
            f"on {default_count} when TVM counts by itself",
            problem=actual != count,
        ),
    ]
    ignored = [f"{name}={os.environ[name]}" for name in (VARIABLE, OPENMP_VARIABLE) if os.environ.get(name)]
    if ignored:
        text = (
            f"{' and '.join(ignored)} of the environment are set anew in every run: use --threads or {OPTION_VARIABLE}"
        )
        findings.append(Finding("threads", text))
    return findings


def _torch_findings(probe: Mapping[str, Any]) -> list[Finding]:
    device = "sees a CUDA device" if probe["cuda"] else "sees no CUDA device"
    return [Finding("PyTorch", f"torch and torchvision load and run together; {device}; {probe['threads']} threads")]
