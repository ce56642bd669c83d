"""Multiplies bfloat16 pairs on the matrix unit of x86, Intel's AMX, by whole tiles of operands.

A tile register holds 16 rows of 64 bytes: 16 × 16 fp32 sums, 16 rows of the left operand by 16 pairs of its depth, or
16 pairs of the depth by 16 columns of the right one. `tdpbf16ps` multiplies two such tiles and adds to the third. Pairs
are those of `harness.compiler.schedules.cpu.bf16`, so that panels are packed as for vectors; a row of the left operand
lies along its depth (`stream_rows`), as a tile reads it.

The instruction sums the first terms of the 16 pairs and their second terms each by themselves, in the order of the
depth, adds both sums, and adds that to what the tile has. All of it is fp32, rounded to nearest and ties to even;
denormal numbers, given and made, are zero (Intel's manual, volume 2, TDPBF16PS). A sum of several thousand terms has
some hundred additions in a row and 16 behind each: its error is a thousandth of that of rounding the operands.

A thread says how large its tiles are before it uses them (`ldtilecfg`) and gives them back afterwards. The code asks
the system for them once, so that whatever loads it may run it; `harness.runtime.cpu` tells of a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from harness.compiler import tir as T
from harness.compiler.schedules.cpu.bf16 import BF16
from harness.compiler.schedules.cpu.emit import prefetch
from harness.compiler.schedules.cpu.microkernels.bf16 import PAIRS
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelProduct
from harness.compiler.schedules.cpu.tile import smallest_tile
from harness.runtime.cpu import REQUEST, SYSTEM_CALL, TILE_DATA

TILE_PAIRS = 16
"""Pairs of the depth in one tile: the depth of a product is a multiple of so many."""

_ROWS, _COLUMNS = 16, 16
"""Rows of a tile, and fp32 sums or pairs in one."""
_SHAPES = ((2, 2), (1, 2))
"""Numbers of tiles of sums, down and across; with those of the operands they take at most eight registers."""
_LEAST_ROWS = 9
"""Fewer rows waste more than half of a tile, and vectors are as fast."""
_STEPS = 8
"""Tiles of depth that all left panels share before the next. 16 KB of the right panel stay in a first cache of 48 KB
while as much of a left one and 8 KB of sums pass through it: 43 bytes a cycle of multiplying come from the second
cache, which gives some 48; with 16 tiles, of which the first cache keeps nothing, it would be 70 (counted, LRU)."""
_BLOCK_BYTES = 1856 * 1024
"""Bytes of the left operand in a block, which passes once through the first cache for each right panel: 32 bytes a
cycle of multiplying. The second cache, 2 MB, gives that much, and the third some 10 (fp32's vectors need 4). A smaller
block would read the weights from there more often."""
_BYTES = 4
_REGISTERS = "={rax},{rax},{rdi},{rsi},~{rcx},~{r11},~{memory},~{flags}"
"""Register constraints of a system call of Linux on x86-64: its answer, number and arguments, and its clobbers."""
_CONFIGURATION, _ASKED = "amx_tile_configuration", "amx_was_asked_for"
_BEGIN, _END = "begin_bf16_tiles", "end_bf16_tiles"


@contextmanager
def _configured() -> Iterator[None]:
    """Emits the configuration of the tiles before the code in the context, and their release after it."""
    T.evaluate(T.call_extern("int32", _BEGIN))
    yield
    T.evaluate(T.call_extern("int32", _END))


def _configuration() -> str:
    """Returns the 64 bytes that `ldtilecfg` reads: palette 1, eight tiles of 16 rows of 64 bytes."""
    content = bytearray(64)
    content[0] = 1
    for register in range(8):
        content[16 + 2 * register] = _COLUMNS * _BYTES
        content[48 + register] = _ROWS
    return "".join(f"\\{byte:02x}" for byte in content)


_SOURCE = f"""
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()

@{_CONFIGURATION} = linkonce_odr constant [64 x i8] c"{_configuration()}"
@{_ASKED} = linkonce_odr global i8 0

define linkonce_odr i32 @{_BEGIN}() {{
  %asked = load atomic i8, ptr @{_ASKED} monotonic, align 1
  %first = icmp eq i8 %asked, 0
  br i1 %first, label %ask, label %configure
ask:
  %answer = call i64 asm sideeffect "syscall", "{_REGISTERS}"(i64 {SYSTEM_CALL}, i64 {REQUEST}, i64 {TILE_DATA})
  store atomic i8 1, ptr @{_ASKED} monotonic, align 1
  br label %configure
configure:
  call void @llvm.x86.ldtilecfg(ptr @{_CONFIGURATION})
  ret i32 0
}}

define linkonce_odr i32 @{_END}() {{
  call void @llvm.x86.tilerelease()
  ret i32 0
}}
"""


def _instruct(name: str, *arguments: int | T.Expr) -> None:
    """Emits an instruction of the unit; registers are numbers."""
    numbers = [T.const(value, "int8") if isinstance(value, int) else value for value in arguments]
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *numbers))


def _multiply(kernel: MicroKernel, product: PanelProduct) -> None:
    """Emits a product whose sums stay in tiles during a chunk of the depth."""
    tile, sums, p, first = product.tile, product.sums, product.p, product.first
    downs, acrosses = range(0, tile.rows, _ROWS), range(0, tile.columns, _COLUMNS)
    places = [(i, j, sums.buffer[sums.index(p, i, j, i * tile.columns + j)]) for i in downs for j in acrosses]
    line = T.const(tile.columns * _BYTES, "int64")
    row = T.const((product.a.stride or kernel.a.stored(product.chunk, product.chunk)) * _BYTES, "int64")

    def move_sums(instruction: str) -> None:
        for n, (_, _, element) in enumerate(places):
            _instruct(instruction, n, T.address_of(element), line)

    product.b.fetch(p, first, None)
    # TVM would make the buffer smaller if it saw less of it being used.
    prefetch(sums.buffer[sums.index(p, tile.rows - 1, tile.columns - 1, tile.size - 1)], write=True)
    with T.If(product.added):
        with T.Then():
            move_sums("tileloadd64")
        with T.Else():
            for n in range(len(places)):
                _instruct("tilezero", n)
    lefts = {i: len(places) + n for n, i in enumerate(downs)}
    rights = {j: len(places) + len(lefts) + n for n, j in enumerate(acrosses)}
    with T.serial(0, product.count // TILE_PAIRS) as step:
        k = step * TILE_PAIRS
        for i, register in lefts.items():
            _instruct("tileloadd64", register, T.address_of(product.a.number(p, first, k, i)), row)
        for j, register in rights.items():
            _instruct("tileloadd64", register, T.address_of(product.b.element(first, k, j)), line)
        for n, (i, j, _) in enumerate(places):
            _instruct("tdpbf16ps", n, lefts[i], rights[j])
    move_sums("tilestored64")


AMX = MicroKernel(
    name="bf16_amx",
    multiplies=BF16,
    a=replace(PAIRS, row_major=True),
    b=PAIRS,
    emit=_multiply,
    source=_SOURCE,
    choose_tile=smallest_tile([(down * _ROWS, across * _COLUMNS) for down, across in _SHAPES]),
    least_rows=_LEAST_ROWS,
    multiple=TILE_PAIRS,
    longest=_STEPS * TILE_PAIRS,
    block_bytes=_BLOCK_BYTES,
    setup=_configured,
)
"""Products on the matrix unit."""
