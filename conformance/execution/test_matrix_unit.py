"""AMX on a CPU without it: each instruction does what Intel's manual says, and whole cases are judged so."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.bf16 import Processor, flushed, multiply_add
from conformance.support.commands import run_code, run_command
from conformance.support.examples import examples
from conformance.support.operators import normal
from conformance.support.place import executes
from harness.compiler.execution.emulation.matrix_unit import emulate, emulated_products, emulation_problem
from harness.compiler.execution.executors import is_emulated
from harness.compiler.targets import HOST
from harness.compiler.targets.linking import linker
from harness.core.case import Case
from harness.core.processors import Processors
from harness.core.settings import REPOSITORY
from harness.runtime.cpu import MATRIX_UNIT, cpu_features, matrix_unit_problem
from perf import beside_matrix_unit

pytestmark = pytest.mark.skipif(emulation_problem() is not None, reason=str(emulation_problem()))
CPU = "x86-64-v3+amx"

SOURCE = """
#include <immintrin.h>

void multiply(const void *shapes, char *sums, long sums_step, const char *left, long left_step, const char *right,
              long right_step) {
    _tile_loadconfig(shapes);
    _tile_loadd(0, sums, sums_step);
    _tile_loadd(1, left, left_step);
    _tile_loadd(7, right, right_step);
    _tile_dpbf16ps(0, 1, 7);
    _tile_stored(0, sums, sums_step);
    _tile_release();
}
void move(const void *shapes, char *to, const char *from, long step) {
    _tile_loadconfig(shapes);
    _tile_stream_loadd(5, from, step);
    _tile_stored(5, to, step);
    _tile_release();
}
void clear(const void *shapes, const void *others, char *to, const char *from) {
    _tile_loadconfig(shapes);
    _tile_loadd(2, from, 64);
    _tile_loadconfig(others);
    _tile_zero(3);
    _tile_stored(3, to, 64);
    _tile_stored(2, to + 1024, 64);
    _tile_release();
}
void of_released(const void *shapes) {
    _tile_loadconfig(shapes);
    _tile_release();
    _tile_zero(0);
}
void of_one_tile_twice(const void *shapes) {
    _tile_loadconfig(shapes);
    __asm__ volatile(".byte 0xC4, 0xE2, 0x72, 0x5C, 0xC1"); // tdpbf16ps tmm0, tmm1, tmm1: assemblers refuse it
}
void of_unfit_tiles(const void *shapes) {
    _tile_loadconfig(shapes);
    _tile_dpbf16ps(0, 1, 2);
}
void of_no_unit(const void *shapes) { __builtin_trap(); }
"""


def compiled(folder: Path, source: str, *flags: str) -> Path:
    """A library of C functions."""
    (folder / "tiles.c").write_text(source)
    command = linker()
    assert command is not None
    flags = (
        "-x",
        "c",
        "-O2",
        "-mamx-tile",
        "-mamx-bf16",
        *flags,
        str(folder / "tiles.c"),
        "-o",
        str(folder / "tiles.so"),
    )
    subprocess.run([*command, *flags], check=True)
    return folder / "tiles.so"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The functions above, as a C compiler encodes their instructions."""
    return compiled(tmp_path_factory.mktemp("tiles"), SOURCE)


@pytest.fixture(scope="module")
def unit(program: Path) -> ctypes.CDLL:
    """The same, in a process that has a unit, or emulates it."""
    emulate()
    matrix_unit_problem()  # asks for it, where there is one
    return ctypes.CDLL(str(program))


def shapes_of(**tiles: tuple[int, int]) -> bytes:
    """What `ldtilecfg` reads: rows, and bytes of a row, by tile."""
    content = bytearray(64)
    content[0] = 1
    for name, (rows, row_bytes) in tiles.items():
        tile = int(name.removeprefix("tile"))
        content[16 + 2 * tile : 18 + 2 * tile] = row_bytes.to_bytes(2, "little")
        content[48 + tile] = rows
    return bytes(content)


def address(array: np.ndarray, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data + offset)


def numbers(shape: tuple[int, ...], seed: int, spread: int) -> np.ndarray:
    """bfloat16, of sizes that differ by powers of two; some of them are zero, denormal, infinite or NaN."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    odd = rng.choice([0.0, -0.0, 1e-39, -1e-40, np.inf, np.nan], shape)
    return np.where(rng.random(shape) < 0.02, odd, found).astype(ml_dtypes.bfloat16)


@examples(60)
@given(
    rows=st.integers(1, 16),
    pairs=st.integers(1, 16),
    columns=st.integers(1, 16),
    spread=st.sampled_from([0, 8, 60]),
    seed=st.integers(0, 1000),
    gap=st.sampled_from([0, 4, 60]),
)
def test_a_product_is_what_the_manual_says(
    unit: ctypes.CDLL, rows: int, pairs: int, columns: int, spread: int, seed: int, gap: int
) -> None:
    """Of tiles of any shape, whose rows lie anywhere in memory; what is between them stays as it is."""
    left = numbers((rows, 2 * pairs), seed, spread)
    right = numbers((pairs, 2 * columns), seed + 1, spread)
    sums = np.full((rows, columns + gap // 4), 7.0, np.float32)
    sums[:, :columns] = numbers((rows, columns), seed + 2, spread)
    expected = sums.copy()
    halves = np.zeros((2, rows, columns), np.float32)
    processor = Processor(flushes=True)
    for k in range(pairs):
        for half in range(2):
            terms = left[:, 2 * k + half, None], right[None, k, half::2]
            halves[half] = multiply_add(halves[half], *terms, processor)
    with np.errstate(invalid="ignore", over="ignore"):
        product = flushed(halves[0] + halves[1])
        expected[:, :columns] = flushed(flushed(sums[:, :columns]) + product)
    shapes = shapes_of(tile0=(rows, 4 * columns), tile1=(rows, 4 * pairs), tile7=(pairs, 4 * columns))
    steps = [ctypes.c_long(array.strides[0]) for array in (sums, left, right)]
    unit.multiply(shapes, address(sums), steps[0], address(left), steps[1], address(right), steps[2])
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize(("rows", "row_bytes"), [(1, 4), (3, 20), (16, 64), (16, 4), (1, 64)])
def test_a_tile_moves_forwards_and_backwards_through_memory(unit: ctypes.CDLL, rows: int, row_bytes: int) -> None:
    source = np.arange(16 * 80, dtype=np.uint32).view(np.uint8).reshape(16, 320)
    for first, step in ((0, 320), (15, -320)):
        result = np.zeros_like(source)
        expected = np.zeros_like(source)
        at = slice(first, first + rows) if step > 0 else slice(first - rows + 1, first + 1)
        expected[at, :row_bytes] = source[at, :row_bytes]
        shapes = shapes_of(tile5=(rows, row_bytes))
        unit.move(shapes, address(result, first * 320), address(source, first * 320), ctypes.c_long(step))
        np.testing.assert_array_equal(result, expected)


def test_tiles_are_zero_once_they_are_configured_again(unit: ctypes.CDLL) -> None:
    result = np.ones((2, 16, 64), np.uint8)
    source = np.full((16, 64), 5, np.uint8)
    shapes = shapes_of(tile2=(16, 64), tile3=(16, 64))
    unit.clear(shapes, shapes, address(result), address(source))
    assert not result.any()


CONSTANTS = (1, -1, 127, -128, 8192, 0x7FFFFFFF, -0x80000000)
CONDITIONS = ("o", "no", "c", "nc", "z", "nz", "be", "a", "s", "ns", "p", "np", "l", "ge", "le", "g")
BETWEEN = (
    *(f"{name} ${constant}, {a}" for name in ("add", "sub", "cmp") for a in ("%q0", "%k0") for constant in CONSTANTS),
    *(f"{name} %q0" for name in ("inc", "xor %q1,", "add %q1,", "mov %q1,", "mov $77,")),
    *(f"{name} %k0" for name in ("inc", "xor %k1,", "add %k1,", "mov %k1,", "mov $77,", "mov $-1,")),
    # The other one of two encodings, as compilers other than the assembler may write it.
    "%{load%} mov %q1, %q0",
    "jmp 1f; inc %q0; 1:",
    "jmp 1f; inc %q0; .skip 200, 0x90; 1:",
    *(f"lea {address}, {a}" for a in ("%q0", "%k0") for address in ("(%q0,%q1)", "-9(%q0,%q1,8)", "0x12345(,%q1,4)")),
    "lea 77(%q1), %q0",
    *(f"cmp $5, %q1; j{condition} 1f; lea 3(%q0), %q0; 1:" for condition in CONDITIONS),
    # Too far for a jump of two bytes.
    *(f"cmp $5, %q1; j{condition} 1f; lea 3(%q0), %q0; .skip 200, 0x90; 1:" for condition in CONDITIONS),
)
"""Instructions of two registers that need no trap of their own after one of the unit."""
FUNCTION = """
void {name}(const void *shapes, long *values) {{
    long a = values[0], b = values[1], flags;
    _tile_loadconfig(shapes);
    __asm__ volatile("{before}; {instruction}; pushfq; popq %2" : "+r"(a), "+r"(b), "=r"(flags) : : "cc");
    _tile_release();
    values[0] = a, values[1] = b, values[2] = flags;
}}
"""
SIZES = st.sampled_from([0, 4, 5, 6, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -1, -(2**31), -(2**63)])


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Two functions for each of these, one of which begins with an instruction of the unit."""
    emulate()
    matrix_unit_problem()
    # The unit's instructions leave flags alone.
    begun = {"after": "cmp $5, %q1; tilezero %%tmm0", "alone": "cmp $5, %q1"}
    functions = (
        FUNCTION.format(name=f"{name}_{n}", before=before, instruction=instruction)
        for n, instruction in enumerate(BETWEEN)
        for name, before in begun.items()
    )
    source = "#include <immintrin.h>\n" + "".join(functions)
    return ctypes.CDLL(str(compiled(tmp_path_factory.mktemp("between"), source, "-mno-red-zone")))


@examples(40)
@given(values=st.tuples(*[SIZES | st.integers(-(2**63), 2**63 - 1)] * 2))
def test_what_is_between_the_units_instructions_is_what_the_processor_does(
    between: ctypes.CDLL, values: tuple[int, int]
) -> None:
    shapes = shapes_of(tile0=(16, 64))
    for n, instruction in enumerate(BETWEEN):
        after, alone = (np.array([*values, 0], np.int64) for _ in range(2))
        between[f"after_{n}"](shapes, address(after))
        between[f"alone_{n}"](shapes, address(alone))
        np.testing.assert_array_equal(after, alone, err_msg=instruction)


WHOLE = (16, 64)
REFUSED = {
    "tiles that were released": ("of_released", shapes_of(tile0=WHOLE)),
    "one tile as both operands": ("of_one_tile_twice", shapes_of(tile0=WHOLE, tile1=WHOLE)),
    "a depth that differs": ("of_unfit_tiles", shapes_of(tile0=WHOLE, tile1=(16, 32), tile2=WHOLE)),
    "rows that differ": ("of_unfit_tiles", shapes_of(tile0=(8, 64), tile1=WHOLE, tile2=WHOLE)),
    "an operand without rows": ("of_unfit_tiles", shapes_of(tile0=WHOLE, tile1=WHOLE)),
    "more rows than there are": ("of_released", shapes_of(tile0=(17, 64))),
    "an unknown palette": ("of_released", b"\2" + bytes(63)),
    "another instruction": ("of_no_unit", bytes(64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_unit_refuses_ends_the_process(name: str, program: Path) -> None:
    function, shapes = REFUSED[name]
    code = (
        "import ctypes\n"
        "from harness.compiler.execution.emulation.matrix_unit import emulate\n"
        "from harness.runtime.cpu import matrix_unit_problem\n"
        "emulate(), matrix_unit_problem()\n"
        f"ctypes.CDLL({str(program)!r}).{function}({shapes!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    # A processor raises a general protection fault for a configuration that it does not know, Linux SIGSEGV.
    assert -done.returncode in (signal.SIGILL, signal.SIGSEGV)


def test_a_case_is_judged_by_its_emulated_outputs(tmp_path: Path) -> None:
    if set(MATRIX_UNIT) <= (cpu_features() or set()):
        pytest.skip("this processor has the unit, and nothing needs to be emulated")
    chosen = ("--component", "box_head", "--strategy", "real", "--target", "llvm", "--cpu", CPU, "--precision", "bf16")
    done = run_command("verify", *chosen, "--emulate", "--report", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed at judge, emulated") == 1
    assert "AMX one by one, and no matrix unit did" in (tmp_path / "VERIFICATION_REPORT.md").read_text()


def test_only_the_unit_is_emulated_and_only_where_it_is_asked_for() -> None:
    def emulated(cpu: str | None, every: bool = True) -> bool:
        return is_emulated(Case("box_head", "real", "llvm", precision="bf16"), ("bf16",), every, Processors(cpu))

    lacking = not set(MATRIX_UNIT) <= (cpu_features() or set())
    assert emulated(CPU) == lacking
    assert not emulated(CPU, every=False)
    assert not emulated("x86-64-v3") and not emulated(None)
    assert not lacking or "verify --emulate" in str(HOST.run_problem(Processors(CPU)))
    if not executes(tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})):
        assert not emulated("sapphirerapids+amx"), "nobody emulates its vectors"
        assert "--emulate" not in str(HOST.run_problem(Processors("sapphirerapids+amx")))


def test_products_are_counted(unit: ctypes.CDLL) -> None:
    shapes = shapes_of(tile0=WHOLE, tile1=WHOLE, tile7=WHOLE)
    arrays = [normal((16, 16)) for _ in range(3)]
    before = emulated_products()
    for _ in range(3):
        unit.multiply(shapes, *(part for array in arrays for part in (address(array), ctypes.c_long(64))))
    assert emulated_products() - before == (0 if matrix_unit_problem() is None else 3)


def test_code_goes_on_at_full_speed_without_the_units_instructions(program: Path) -> None:
    """Sums stay as they were, and nothing traps a second time: the signal would end the process."""
    if set(MATRIX_UNIT) <= (cpu_features() or set()):
        pytest.skip("this processor has the unit, and nothing traps")
    code = (
        "import ctypes, signal, numpy as np\n"
        "from harness.compiler.execution.emulation.matrix_unit import emulated_products, skip_instructions\n"
        "skip_instructions()\n"
        f"unit, shapes = ctypes.CDLL({str(program)!r}), {shapes_of(tile0=WHOLE, tile1=WHOLE, tile7=WHOLE)!r}\n"
        "sums, others = np.full((16, 16), 3.0, np.float32), np.ones((16, 32), np.uint16)\n"
        "left = sums.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(64)\n"
        "right = others.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(64)\n"
        "unit.multiply(shapes, *left, *right, *right)\n"
        "signal.signal(signal.SIGILL, signal.SIG_DFL)\n"
        "unit.multiply(shapes, *left, *right, *right)\n"
        "unit.of_released(shapes)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert done.returncode == -signal.SIGILL, "a function that was not called before traps"
    last = code.rindex("unit.of_released")
    code = code[:last] + "assert (sums == 3).all() and emulated_products() == 0\n"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_what_bf16_takes_beside_the_unit_is_measured() -> None:
    if set(MATRIX_UNIT) <= (cpu_features() or set()):
        pytest.skip("this processor has the unit, and nothing traps")

    def measured(*options: str) -> subprocess.CompletedProcess[str]:
        code = "import runpy\nrunpy.run_module('perf.beside_matrix_unit', run_name='__main__', alter_sys=True)"
        return run_code(code, "--rounds", "1", *options)

    done = measured("--component", "box_head")
    assert done.returncode == 0, done.stderr
    # 400 queries, two layers of 256 × 256; the layer of four columns is fp32.
    assert "0.10 GFLOP are left to units" in done.stdout
    assert re.search(r"with these vectors no unit makes bf16 more than \d+\.\d times as fast as fp32", done.stdout)
    assert "1 × matmul_bf16_amx_add_relu 400x256 · 256x256" in done.stdout
    done = measured("--component", "interactive")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == ("error: interactive is no trace of calls: measure a component that is one")
    for options, sentence in {
        ("--component", "boxes"): "there is no component 'boxes': choose one of",
        ("--component", "box_head", "--cpu", "x86-64-v3"): "--cpu x86-64-v3 must name a CPU",
        ("--component", "box_head", "--rounds", "0"): "cannot measure 0 rounds: give --rounds 1 or more",
    }.items():
        with pytest.raises(SystemExit, match=f"^error: {sentence}"):
            beside_matrix_unit.main(options)


@pytest.mark.wide
def test_products_are_measured_as_shares_of_the_units_peak() -> None:
    """Instructions of the unit do nothing here, so that the numbers mean nothing; everything else runs.

    One thread: two would trap at an instruction that the other overwrites.
    """
    if set(MATRIX_UNIT) <= (cpu_features() or set()):
        pytest.skip("this processor has the unit, and nothing traps")
    command = [sys.executable, "-m", "perf.matrix_unit"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: this CPU has no matrix unit (AMX): use one that has")
    code = (
        "from harness.compiler.execution.emulation.matrix_unit import skip_instructions\n"
        "from harness.core.processes.threads import choose_threads\n"
        "from harness.runtime.cpu import MATRIX_UNIT, add_emulated_features\n"
        "from perf.matrix_unit import measure\n"
        "choose_threads(1)\n"
        "add_emulated_features(MATRIX_UNIT)\n"
        "skip_instructions()\n"
        "measure(rounds=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    _, *products = done.stdout.splitlines()
    assert [line.split()[0] for line in products] == ["qkv", "proj", "fc1", "fc2"]
    for line in products:
        assert re.search(
            r"ours .* of the peak, oneDNN .* of the peak, oneDNN / ours \d+\.\d\d; peak [\d,]+ GFLOP/s", line
        )
