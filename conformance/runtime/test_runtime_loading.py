"""A library that this machine cannot run says so when it is loaded: another CPU, another architecture, no library."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tvm
from tvm import relax

from conformance.support.assembly import assembly
from conformance.support.commands import run_command
from conformance.support.sentences import sentence
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import compile_module, lower_module
from harness.compiler.targets.llvm import required_cpu
from harness.core.processors import CPU_VARIABLE, Processors
from harness.runtime.cpu import (
    MATRIX_UNIT,
    VECTOR_FEATURES,
    architecture,
    common_cpu,
    cpu_features,
    matrix_unit_problem,
)
from harness.runtime.cpu import features_of_linux as linux
from harness.runtime.cpu import features_of_macos as macos
from harness.runtime.executable import Executable
from harness.runtime.loading import LoadError, cpu_problem
from harness.verify.report import read_report

FOREIGN_CPUS = {
    "x86_64": ("bdver2", "sapphirerapids", "diamondrapids", "znver5"),
    "aarch64": ("neoverse-v2", "apple-m4", "neoverse-v1"),
}
"""Of these every machine lacks something: FMA4 went with AMD's Bulldozer, AVX-512 FP16 is Intel's, Apple has no SVE."""

LOAD = """
import sys, numpy
from pathlib import Path
from harness.runtime.devices import open_device, to_device, to_numpy
from harness.runtime.loading import LoadError, load_library
device = open_device("llvm")
try:
    machine = load_library(Path(sys.argv[1]), device)
except LoadError as error:
    sys.exit(f"error: {error}")
half = to_device(numpy.full((37, 50), 0.5, "float32"), device)
print(to_numpy(machine["main"](half, half, half)[0]).sum())
"""
"""As folders are loaded, without TVM's compiler, whose import takes seconds."""
LOAD_UNCHECKED = LOAD.replace(
    "try:", "from harness.runtime import loading; loading.cpu_problem = lambda *_: None\ntry:"
)


def run_in_process(code: str, library: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(library)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def promised(cpu: str, triple: str | None = None) -> frozenset[str]:
    """What LLVM connects with a CPU name, of what decides whether code runs."""
    target = {"kind": "llvm", "mcpu": cpu} | ({} if triple is None else {"mtriple": triple})
    return frozenset(required_cpu(tvm.target.Target(target))[1])


def fused_multiply_add() -> tvm.IRModule:
    """a · b + c on fp32 matrices; `main` returns a tuple, as imported modules do."""
    parameters = [relax.Var(name, relax.TensorType([37, 50], "float32")) for name in "abc"]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            product = builder.emit(relax.op.multiply(*parameters[:2]))
            result = builder.emit(relax.op.add(product, parameters[2]))
            output = builder.emit_output(relax.Tuple([result]))
        builder.emit_func_output(output)
    return builder.get()


def compiled(folder: Path, cpu: str | None = None) -> Path:
    """A library for this machine's CPU, or another one."""
    library = folder / "model.so"
    compile_module(fused_multiply_add(), TARGETS["llvm"], library, processors=Processors(cpu))
    return library


@pytest.fixture
def foreign_cpu() -> str:
    """The name of a CPU with features that this machine lacks."""
    present = cpu_features()
    if present is None:
        pytest.skip("this system does not tell what its processor can do")
    lacking = [name for name in FOREIGN_CPUS[architecture()] if not promised(name) <= present]
    if not lacking:
        pytest.skip(f"this machine has everything that {', '.join(FOREIGN_CPUS[architecture()])} have")
    return lacking[0]


def test_a_library_for_this_machine_loads_and_says_what_it_needs(tmp_path: Path) -> None:
    done = run_in_process(f"{LOAD}print('torch' in sys.modules)\nimport torch", compiled(tmp_path))
    assert done.returncode == 0, done.stderr
    total, imports_torch = done.stdout.split()
    assert float(total) == 37 * 50 * 0.75
    assert imports_torch == "False", "it takes seconds, and can be imported afterwards"
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "model.so")), tvm.cpu())
    cpu, *features = machine["required_cpu"]().split()
    assert (cpu, features) == required_cpu(TARGETS["llvm"].tvm_target())
    assert features


def test_a_library_for_another_cpu_is_refused_when_it_is_loaded(foreign_cpu: str, tmp_path: Path) -> None:
    library = compiled(tmp_path, foreign_cpu)
    missing = [feature for feature in VECTOR_FEATURES if feature in promised(foreign_cpu) - (cpu_features() or set())]
    done = run_in_process(LOAD, library)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    problem, common = f"{foreign_cpu}, whose {', '.join(missing)}", common_cpu(cpu_features() or frozenset())
    assert re.match("error: " + sentence("foreign-cpu", library=library, problem=problem, cpu=common), line)
    advised = compiled(tmp_path, line.rpartition(" ")[2])
    assert run_in_process(LOAD, advised).returncode == 0


x86_on_linux = pytest.mark.skipif((platform.system(), architecture()) != ("Linux", "x86_64"), reason="of x86 on Linux")


@x86_on_linux
def test_the_matrix_unit_is_asked_for_where_it_is_named(tmp_path: Path) -> None:
    cpu = common_cpu(cpu_features() or frozenset())
    library = compiled(tmp_path, f"{cpu}+amx")
    done = run_in_process(LOAD, library)
    if set(MATRIX_UNIT) <= (cpu_features() or set()) and matrix_unit_problem() is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    lacks = sentence("foreign-cpu", problem="whose amx-tile, amx-bf16", cpu=cpu)
    assert bool(re.search(lacks, line)) != bool(re.search(sentence("no-matrix-unit", compiled_for=cpu), line))
    assert run_in_process(LOAD, compiled(tmp_path, cpu)).returncode == 0


@x86_on_linux
@pytest.mark.skipif(matrix_unit_problem() is None, reason="the system allows the matrix unit")
def test_a_refusal_of_the_matrix_unit_is_one_sentence(tmp_path: Path) -> None:
    cpu = common_cpu(cpu_features() or frozenset())
    done = run_in_process(LOAD_UNCHECKED, compiled(tmp_path, f"{cpu}+amx"))
    assert done.returncode == 1
    refused = sentence("no-matrix-unit", refusal=matrix_unit_problem(), compiled_for=cpu)
    assert re.fullmatch(f"error: {refused}\n", done.stderr)


@dataclass(frozen=True)
class Instruction:
    """One that some processors lack.

    Attributes:
        feature: What it belongs to.
        code: It, for registers alone.
        cpu: LLVM's name of a CPU for which it makes a multiply-add of such instructions.
        pattern: What they look like in assembly.
    """

    feature: str
    code: str
    cpu: str
    pattern: str


INSTRUCTIONS = (
    Instruction("avx512f", code="62f17c4858c0", cpu="znver5", pattern=r"\bvfmadd\w+ps\b.*%zmm"),  # vaddps of 512 bits
    Instruction("fma4", code="c4e3f968c000", cpu="bdver2", pattern=r"\bvfmaddps\b"),
)
EXECUTE = """
import ctypes, mmap, sys
code = bytes.fromhex(sys.argv[1]) + b"\\xc3"
memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(code)
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))()
"""
"""Executes an instruction, given in hexadecimal digits, and returns."""


def executed(code: str) -> int:
    """What becomes of a process that executes an instruction."""
    return subprocess.run([sys.executable, "-c", EXECUTE, code], capture_output=True, check=False).returncode


on_x86_64_linux = pytest.mark.skipif(
    (platform.system(), architecture()) != ("Linux", "x86_64"), reason="the instructions are those of x86-64 on Linux"
)


@on_x86_64_linux
def test_what_the_system_announces_can_be_executed() -> None:
    """The other way round it does not hold: Zen 1 executes FMA4, which it does not announce."""
    present = cpu_features() or frozenset()
    assert executed("90") == 0  # nop
    assert executed("0f0b") == -signal.SIGILL  # ud2, which no processor has
    assert all(executed(instruction.code) == 0 for instruction in INSTRUCTIONS if instruction.feature in present)


@on_x86_64_linux
def test_without_the_check_the_process_would_die(tmp_path: Path) -> None:
    lacking = [one for one in INSTRUCTIONS if executed(one.code) == -signal.SIGILL]
    if not lacking:
        pytest.skip(f"this processor executes {' and '.join(one.feature for one in INSTRUCTIONS)}")
    target = TARGETS["llvm"].tvm_target(Processors(lacking[0].cpu))
    lowered = lower_module(fused_multiply_add(), TARGETS["llvm"], target)
    assert re.search(lacking[0].pattern, assembly(lowered, target))
    library = compiled(tmp_path, lacking[0].cpu)
    assert run_in_process(LOAD, library).returncode == 1
    assert run_in_process(LOAD_UNCHECKED, library).returncode == -signal.SIGILL


@pytest.mark.parametrize("named_by", ["option", pytest.param("variable", marks=pytest.mark.wide)])
def test_verify_for_another_cpu_compiles_and_says_why_it_does_not_run(
    named_by: str, foreign_cpu: str, tmp_path: Path
) -> None:
    chosen = ("--cpu", foreign_cpu) if named_by == "option" else ()
    variable = "generic" if named_by == "option" else foreign_cpu  # the option wins
    environment = os.environ | {CPU_VARIABLE: variable}
    done = run_command("verify", "--component", "box_head", "--report", str(tmp_path), *chosen, environment=environment)
    assert done.returncode == 0  # what can be compiled was
    assert "1 of 1 cases were compiled and not run" in done.stdout
    (case,) = read_report(tmp_path / "verification_report.json")["cases"]
    assert (case["status"], case["stage"]) == ("unavailable", "compile")
    assert f"code compiled for {foreign_cpu}, whose" in case["error"]["message"]


def test_a_library_for_another_architecture(tmp_path: Path) -> None:
    other = "aarch64" if architecture() == "x86_64" else "x86_64"
    target = tvm.target.Target({"kind": "llvm", "mtriple": f"{other}-linux-gnu"})
    executable = relax.build(fused_multiply_add(), target)

    def link(output: str, objects: list[str], **_options: object) -> None:
        command = [sys.executable, "-m", "ziglang", "ld.lld", "-shared", "-o", output, *objects]
        subprocess.run(command, check=True, capture_output=True)

    executable.export_library(str(tmp_path / "model.so"), fcompile=link)
    done = run_in_process(LOAD, tmp_path / "model.so")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(sentence("foreign-library", library="model.so", origin2=other, host2=architecture()), line)


def test_a_library_for_another_system(tmp_path: Path) -> None:
    """The first bytes of a Mach-O library, or of an ELF one on macOS."""
    elf, mach_o = b"\x7fELF\2\1" + bytes(12) + b"\x3e", b"\xcf\xfa\xed\xfe\x0c\0\0\1"
    here = platform.system()
    (tmp_path / "model.so").write_bytes((elf if here == "Darwin" else mach_o).ljust(64, b"\0"))
    with pytest.raises(LoadError, match=sentence("foreign-library", host=platform.system().replace("Darwin", "macOS"))):
        Executable(tmp_path / "model.so", tvm.cpu(), [])


@pytest.mark.parametrize(("content", "code"), [(None, "unreadable-library"), (b"text", "not-a-library")])
def test_no_library(content: bytes | None, code: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "model.so").write_bytes(content)
    with pytest.raises(LoadError, match=sentence(code, library="model.so")):
        Executable(tmp_path / "model.so", tvm.cpu(), [])


@pytest.mark.skipif(platform.system() == "Darwin", reason="macOS reports a Mach-O file that is cut off by itself")
def test_half_a_library(tmp_path: Path) -> None:
    """The loader itself would die of SIGBUS."""
    content = compiled(tmp_path).read_bytes()
    for size in (len(content) // 2, len(content) - 1):
        (tmp_path / "half.so").write_bytes(content[:size])
        with pytest.raises(LoadError, match=sentence("truncated-library", library="half.so")):
            Executable(tmp_path / "half.so", tvm.cpu(), [])


def test_a_library_that_the_loader_rejects(tmp_path: Path) -> None:
    content = compiled(tmp_path).read_bytes()
    (tmp_path / "model.so").write_bytes(content[:64] + bytes(len(content) - 64))
    with pytest.raises(LoadError, match=sentence("unloadable-library", library="model.so")):
        Executable(tmp_path / "model.so", tvm.cpu(), [])


def test_where_the_system_does_not_tell_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.runtime.loading.cpu_features", lambda: None)
    assert cpu_problem("z80", ["everything"]) is None
    monkeypatch.setattr("harness.runtime.loading.cpu_features", lambda: frozenset({"avx"}))
    assert cpu_problem("z80", ["avx"]) is None
    assert "compiled for z80, whose avx2, fma this machine's" in str(cpu_problem("z80", ["avx", "avx2", "fma"]))


# --- what systems say about real processors, held to what LLVM connects with their names ---

GRAVITON2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
GRAVITON3 = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 "
    "sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng"
)
SKYLAKE = (
    "fpu vme sse sse2 ht syscall nx lm pni pclmulqdq ssse3 fma cx16 sse4_1 sse4_2 x2apic movbe popcnt aes xsave avx "
    "f16c rdrand hypervisor lahf_lm abm bmi1 avx2 bmi2 erms avx512f avx512dq rdseed adx avx512cd avx512bw avx512vl"
)
M1 = """hw.optional.floatingpoint: 1
hw.optional.arm.FEAT_LSE: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_FHM: 1
hw.optional.arm.FEAT_RDM: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_SHA3: 1
hw.optional.arm.FEAT_FCMA: 1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_I8MM: 0
machdep.cpu.brand_string: Apple M1"""
INTEL_MAC = """hw.optional.avx2_0: 1
machdep.cpu.brand_string: Intel(R) Core(TM) i7-8850H CPU @ 2.60GHz
machdep.cpu.features: FPU SSE SSE2 SSE3 PCLMULQDQ SSSE3 FMA CX16 SSE4.1 SSE4.2 x2APIC MOVBE POPCNT AES XSAVE AVX1.0 F16C
machdep.cpu.leaf7_features: RDWRFSGS BMI1 AVX2 SMEP BMI2 ERMS INVPCID
machdep.cpu.extfeatures: SYSCALL XD 1GBPAGE EM64T LAHF LZCNT PREFETCHW RDTSCP TSCI"""
MACHINES = {
    "Graviton 2": (
        linux(f"processor : 0\nFeatures : {GRAVITON2}\n"),
        "neoverse-n1",
        "neoverse-v1",
        "aarch64-linux-gnu",
    ),
    "Graviton 3": (
        linux(f"Features : {GRAVITON3}\n\nFeatures : fp\n"),
        "neoverse-v1",
        "neoverse-v2",
        "aarch64-linux-gnu",
    ),
    "Skylake": (linux(f"flags\t\t: {SKYLAKE}\n"), "skylake-avx512", "icelake-server", "x86_64-linux-gnu"),
    "Apple M1": (macos(M1), "apple-m1", "apple-m2", "arm64-apple-macos"),
    "Intel Mac": (macos(INTEL_MAC), "skylake", "skylake-avx512", "x86_64-apple-macos"),
}


@pytest.mark.parametrize(("features", "own", "later", "triple"), MACHINES.values(), ids=MACHINES)
def test_a_processor_runs_what_is_compiled_for_it_and_not_for_its_successor(
    features: frozenset[str], own: str, later: str, triple: str
) -> None:
    assert promised(own, triple) <= features
    assert not promised(later, triple) <= features
    assert promised(common_cpu(features), triple) <= features


@pytest.mark.parametrize("features", [linux(""), linux("processor : 0\nmodel name : x\n"), macos(""), macos("a: 1\n")])
def test_a_system_that_tells_nothing(features: frozenset[str] | None) -> None:
    assert features is None
