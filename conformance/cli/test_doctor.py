"""The doctor: every known-bad combination is named with its fix, and what it says about this machine is true."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from harness.cli.doctor import render
from harness.compiler.doctor.diagnosis import Finding, bf16_products, diagnose, run_probe
from harness.compiler.doctor.known_bad import KNOWN_BAD, PACKAGES, known_bad
from harness.compiler.targets import TARGETS
from harness.core.machine import versions
from harness.core.processes.threads import thread_count, thread_count_reason
from harness.runtime.cpu import features_of_linux as linux
from harness.runtime.threads import usable_cpus

GOOD = {
    "apache-tvm": "0.27.0.post1",
    "apache-tvm-ffi": "0.1.14.post1",
    "numpy": "2.3.5",
    "torch": "2.15.0",
    "torchvision": "0.29.2",
    "sam3": "0.1.4",
    "open_clip_torch": "3.3.0",
    "psutil": "7.2.2",
}
BASE = {name: GOOD[name] for name in ("apache-tvm-ffi", "numpy", "psutil")}


def without(name: str) -> dict[str, str]:
    return {other: version for other, version in GOOD.items() if other != name}


@pytest.mark.parametrize("versions", [GOOD, BASE, {}], ids=["full", "base", "nothing"])
def test_a_sound_installation_has_nothing_bad(versions):
    assert known_bad(versions) == ()


BAD = {
    "tvm and ffi": (GOOD | {"apache-tvm-ffi": "0.1.15.post2"}, "pip install 'apache-tvm-ffi<0.1.15'"),
    "tvm and the first bad ffi": (GOOD | {"apache-tvm-ffi": "0.1.15"}, "pip install 'apache-tvm-ffi<0.1.15'"),
    "cpu torch": (GOOD | {"torch": "2.15.0+cpu"}, "install both from PyPI, or both from PyTorch's CPU index"),
    "no psutil": (without("psutil"), "pip install psutil"),
    "no vocabulary": (without("open_clip_torch"), "pip install open_clip_torch, which carries the same file"),
    "no torchvision": (without("torchvision"), "pip install 'sam3-tvm[verify]'"),
    "no sam3": (without("sam3"), "pip install 'sam3-tvm[verify]'"),
    "new numpy": (GOOD | {"numpy": "2.4.1"}, "pip install 'numpy<2.4'"),
}


@pytest.mark.parametrize(("versions", "fix"), BAD.values(), ids=BAD)
def test_each_bad_combination_is_named_with_its_fix(versions, fix):
    (entry,) = known_bad(versions)
    assert entry.fix == fix
    assert entry.problem


def test_every_entry_of_the_table_is_covered():
    assert {id(entry) for versions, _ in BAD.values() for entry in known_bad(versions)} == {id(e) for e in KNOWN_BAD}


@pytest.mark.parametrize(
    "versions",
    [
        GOOD | {"torch": "2.15.0+cpu", "torchvision": "0.29.2+cpu"},
        GOOD | {"apache-tvm": "0.28.0", "apache-tvm-ffi": "0.1.15.post2"},
    ],
    ids=["both cpu", "later tvm"],
)
def test_what_goes_together_is_not_accused(versions):
    assert known_bad(versions) == ()


def test_a_version_that_is_none_matches_no_range():
    assert known_bad(GOOD | {"apache-tvm-ffi": "built from source"}) == ()


@pytest.mark.usefixtures("forked_processes")  # `conformance/processes/test_poisoned_folder.py` runs the command
def test_this_machine():
    """One diagnosis of this machine, held to what the parts say."""
    findings = diagnose()
    text = {finding.topic: "" for finding in findings}
    for finding in findings:
        text[finding.topic] += f"{finding.text}\n"
    assert [finding for finding in findings if finding.problem] == []  # `make setup` installs what goes together
    for name, target in TARGETS.items():
        compile_problem, run_problem = target.compile_problem(), target.run_problem()
        compiles = f"cannot compile: {compile_problem}" if compile_problem else "compiles;"
        assert text[f"target {name}"].startswith(compiles)
        precisions = f"precisions: {', '.join(target.precisions)}"
        assert text[f"target {name}"].strip().endswith(f"{run_problem or ' runs'}; {precisions}")
    assert f"a run uses {thread_count()} of {usable_cpus()} usable CPUs: {thread_count_reason()}" in text["threads"]
    assert f"really runs on {thread_count()} threads" in text["threads"]
    for name, version in versions(PACKAGES).items():
        assert f"{name} {version or 'not installed'}" in text["versions"]


def test_what_multiplies_bf16_is_told_and_why_a_matrix_unit_is_refused():
    there = linux("flags : avx512f amx_bf16 avx512_bf16 amx_tile amx_int8")
    assert bf16_products(there, lambda: None).startswith("bf16: vdpbf16ps; ")
    assert bf16_products(there, lambda: None).endswith("there, used with --cpu NAME+amx")
    assert bf16_products(there, lambda: "operation not permitted").endswith("(AMX) refused, operation not permitted")
    lacking = bf16_products(linux("flags : avx512f amx_tile"), lambda: None)
    assert lacking == "bf16: fp32 arithmetic on shifted halves, no instruction; no matrix unit (AMX)"
    integers = "bf16: 16-bit integers that share scales, no instruction; no matrix unit (AMX)"
    assert bf16_products(linux("flags : avx avx2 fma"), lambda: None) == integers
    assert bf16_products(linux("flags : avx2 fma avx512f avx512bw avx512_vnni"), lambda: None) == integers
    assert bf16_products(linux("flags : avx2 fma avx512f avx512bw"), lambda: None) == lacking
    assert bf16_products(linux("Features : fp asimd bf16 i8mm"), lambda: None) == "bf16: bfmmla and bfdot"
    assert bf16_products(linux("Features : fp asimd"), lambda: None).endswith("no instruction")


def test_a_probe_that_crashes_is_a_finding():
    (finding,) = run_probe("TVM", "conformance.support.misbehaviour:read_through_a_null_pointer", lambda value: [])
    assert finding.problem
    assert finding.topic == "TVM"
    assert "SIGSEGV" in finding.text
    assert "before the crash" in finding.text
    assert "make clean setup" in finding.fix


def test_a_probe_that_fails_is_a_finding():
    (finding,) = run_probe("TVM", "conformance.support.misbehaviour:fail_without_argument", lambda value: [])
    assert finding.problem
    assert "failed in 'looking': no such library" in finding.text


def test_rendering_shows_everything_and_marks_problems():
    findings = [Finding("CPU", "fast"), Finding("versions", "a 1, b 2: [crash]", problem=True, fix="pip install 'b<2'")]
    screen = io.StringIO()
    Console(file=screen, width=100).print(render(findings))
    lines = screen.getvalue().splitlines()
    assert any("CPU" in line and "fast" in line and "!" not in line for line in lines)
    assert any("! " in line and "a 1, b 2: [crash]" in line for line in lines)
    assert any("fix: pip install 'b<2'" in line for line in lines)
