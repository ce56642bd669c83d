"""Products of bfloat16 pairs on the matrix unit of x86, Intel's AMX: whole tiles of operands instead of vectors.

A tile register holds 16 rows of 64 bytes: 16 × 16 fp32 sums, 16 rows of the left operand by 16 pairs of its depth, or
16 pairs of the depth by 16 columns of the right one. `tdpbf16ps` multiplies two such tiles and adds to the third. A
pair is what `harness.schedules.cpu.bf16` says, so that panels are packed as for vectors; a row of the left operand lies
along its depth (`stream_rows`), as a tile reads it.

The instruction sums the first terms of the 16 pairs and their second terms each by themselves, in the order of the
depth, adds both sums, and adds that to what the tile has. All of it is fp32, rounded to nearest and ties to even;
denormal numbers, given and made, are zero (Intel's manual, volume 2, TDPBF16PS). A sum of several thousand terms has
some hundred additions in a row and 16 behind each: its error is a thousandth of that of rounding the operands.

With `with_parts` the unit multiplies fp32 numbers, six products of parts for each (`harness.schedules.cpu.bf16x6`): a
panel has a chunk of the first parts of its elements, then one of the second, then one of the third. Sums of a chunk
begin as zero, and vectors add them to those of the chunks before. Tiles that were loaded for one product stay for the
next.

A thread says how large its tiles are before it uses them (`ldtilecfg`) and gives them back afterwards. The code asks
the system for them once, so that whatever loads it may run it; `harness.runtime.matrix_unit` tells of a refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tvm

from harness.runtime.cpu import MATRIX_UNIT
from harness.runtime.matrix_unit import REQUEST, SYSTEM_CALL, TILE_DATA
from harness.schedules.cpu.bf16x6 import LARGE, PARTS, SMALL, pairs_of_fp32, parts_of_pairs
from harness.schedules.cpu.emit import Arithmetic, Split, Tiles

Products = Sequence[tuple[int, int]]
"""Parts of the left and of the right panel that are multiplied, in order; an element of one part has part 0 alone."""
_WHOLE: Products = ((0, 0),)

PAIRS = 16
"""Pairs of the depth in one tile: the depth of a product is a multiple of so many."""

_ROWS, _COLUMNS = 16, 16
"""Rows of a tile, and fp32 sums or pairs in one."""
_SHAPES = ((2, 2), (1, 2))
"""Tiles of sums, down and across: with those of the operands, eight registers at most."""
_LEAST_ROWS = 9
"""Fewer rows waste more than half of a tile, and vectors are as fast."""
_STEPS = 8
"""Tiles of depth that all left panels share before the next. 16 KB of the right panel stay in a first cache of 48 KB
while as much of a left one and 8 KB of sums pass through it: 43 bytes a cycle of multiplying come from the second
cache, which gives some 48; with 16 tiles, of which the first cache keeps nothing, it would be 70 (counted, LRU)."""
_LEAST_ROWS_OF_PARTS = 64
"""Fewer rows are bound by their weights, which have six bytes instead of four: one takes 0.4 ns where a core reads 14
GB/s, its six products with 64 rows as long at 2 TFLOP/s of the unit, and 0.75 ns with vectors."""
_STEPS_OF_PARTS = 4
"""Tiles of depth in a chunk of parts: 24 KB of the right panel."""
_BLOCK_BYTES = 1856 * 1024
"""Of the left operand in a block, which passes once through the first cache for each right panel: 32 bytes a cycle of
multiplying. The second cache, 2 MB, gives that much, and the third some 10 (fp32's vectors ask for 4). A smaller block
would read the weights from there more often."""
_BYTES = 4
_REGISTERS = "={rax},{rax},{rdi},{rsi},~{rcx},~{r11},~{memory},~{flags}"
"""Of a system call of Linux on x86-64: its answer, number and arguments, and what it changes."""
_CONFIGURATION, _ASKED = "amx_tile_configuration", "amx_was_asked_for"
_BEGIN, _END, _MULTIPLY = "begin_bf16_tiles", "end_bf16_tiles", "multiply_bf16_tiles"
_MULTIPLY_PARTS = "multiply_bf16x6_tiles"


def matrix_unit(target: tvm.target.Target) -> bool:
    """Returns whether code for a target may use the matrix unit: its attributes name both features.

    The name of a processor alone is not enough, because hypervisors and containers hide the unit of one that has it.
    """
    attributes = {str(attribute) for attribute in target.attrs.get("mattr", ())}
    return {f"+{feature}" for feature in MATRIX_UNIT} <= attributes


def with_tiles(vectors: Arithmetic) -> Arithmetic:
    """Returns the arithmetic of the matrix unit, with the pairs of that of vectors."""
    functions = [_function(*shape) for shape in _SHAPES]
    return _in_tiles(vectors, _MULTIPLY, functions, _LEAST_ROWS, _STEPS)


def with_parts(vectors: Arithmetic) -> Arithmetic:
    """Returns the arithmetic of the matrix unit for fp32 numbers, from that of vectors of bfloat16."""
    functions = [_function_of_parts(*shape) for shape in _SHAPES]
    pairs, split = pairs_of_fp32(vectors), parts_of_pairs()
    return _in_tiles(pairs, _MULTIPLY_PARTS, functions, _LEAST_ROWS_OF_PARTS, _STEPS_OF_PARTS, split)


def _in_tiles(
    vectors: Arithmetic, name: str, functions: Sequence[str], least_rows: int, steps: int, split: Split | None = None
) -> Arithmetic:
    """Returns an arithmetic of the matrix unit.

    Args:
        vectors: The arithmetic of vectors whose elements panels have.
        name: Name of the functions that multiply.
        functions: What they are.
        least_rows: Fewer rows are left to vectors.
        steps: Tiles of depth in a chunk.
        split: What the parts of an element are; None if it has one.
    """
    shapes = [(down * _ROWS, across * _COLUMNS) for down, across in _SHAPES]
    tiles = Tiles(name, shapes, least_rows, PAIRS, steps * PAIRS, _BEGIN, _END, split=split, block_bytes=_BLOCK_BYTES)
    return vectors.in_panels("amx", "\n".join([_DECLARED, _AROUND, *functions]), tiles)


def _configuration() -> str:
    """Returns the 64 bytes that `ldtilecfg` reads: palette 1, eight tiles of 16 rows of 64 bytes."""
    content = bytearray(64)
    content[0] = 1
    for register in range(8):
        content[16 + 2 * register] = _COLUMNS * _BYTES
        content[48 + register] = _ROWS
    return "".join(f"\\{byte:02x}" for byte in content)


_DECLARED = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)

!0 = distinct !{!0, !1}
!1 = !{!"llvm.loop.unroll.disable"}
"""
"""With a note for the loops: a step takes 64 cycles at least, and nothing is gained by repeating it in the code."""

_AROUND = f"""
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


def _function(down: int, across: int) -> str:
    """Returns the function that adds the product of one left and one right panel to sums in memory, or makes them.

    Args:
        down: Tiles of sums, from above to below.
        across: Tiles of sums, from left to right.
    """
    return f"""
define linkonce_odr i32 @{_MULTIPLY}_{_panels(down, across)}({_ARGUMENTS}) {{
entry:
  %block = mul i64 %row, {_ROWS}
{_places("sum", "%sums", down, across)}
  %new = icmp eq i32 %added, 0
  br i1 %new, label %zero, label %load
zero:
{_zeros(down, across)}
  br label %begin
load:
{_moves("tileloadd64", "sum", down, across)}
  br label %begin
begin:
  br label %step
{_loop("step", "begin", "end", down, across, _WHOLE)}
end:
{_moves("tilestored64", "sum", down, across)}
  ret i32 0
}}
"""


def _function_of_parts(down: int, across: int) -> str:
    """Returns the same for panels of parts, whose sums begin as zero: those that were there are added afterwards."""
    width = across * _COLUMNS * _BYTES
    vectors = down * _ROWS * across
    parts = "\n".join(
        f"  %{side}.part.{part} = mul i64 %count, {part * PAIRS * stride}"
        for side, stride in (("left", _BYTES), ("right", width))
        for part in range(1, PARTS)
    )
    return f"""
define linkonce_odr i32 @{_MULTIPLY_PARTS}_{_panels(down, across)}({_ARGUMENTS}) {{
entry:
  %chunk = alloca [{vectors} x {_VECTOR}], align 64
  %block = mul i64 %row, {_ROWS}
  %count = zext i32 %steps to i64
{parts}
{_places("sum", "%sums", down, across)}
{_places("part", "%chunk", down, across)}
{_zeros(down, across)}
  br label %small
{_loop("small", "entry", "between", down, across, SMALL)}
between:
  br label %large
{_loop("large", "between", "end", down, across, LARGE)}
end:
  %new = icmp eq i32 %added, 0
  br i1 %new, label %make, label %keep
make:
{_moves("tilestored64", "sum", down, across)}
  ret i32 0
keep:
{_moves("tilestored64", "part", down, across)}
  br label %add
add:
  %v = phi i32 [ 0, %keep ], [ %v.next, %add ]
  %here = getelementptr {_VECTOR}, ptr %chunk, i32 %v
  %there = getelementptr {_VECTOR}, ptr %sums, i32 %v
  %one = load {_VECTOR}, ptr %here, align 64
  %other = load {_VECTOR}, ptr %there, align 4
  %both = fadd {_VECTOR} %other, %one
  store {_VECTOR} %both, ptr %there, align 4
  %v.next = add i32 %v, 1
  %v.more = icmp slt i32 %v.next, {vectors}
  br i1 %v.more, label %add, label %done
done:
  ret i32 0
}}
"""


_ARGUMENTS = "ptr %sums, ptr %left, ptr %right, i64 %row, i32 %steps, i32 %added"
_VECTOR = f"<{_COLUMNS} x float>"
"""A row of a tile of sums."""


def _panels(down: int, across: int) -> str:
    return f"{down * _ROWS}x{across * _COLUMNS}"


def _places(name: str, base: str, down: int, across: int) -> str:
    """Returns where tiles of sums lie, row by row of all of them, from a first address on."""
    width = across * _COLUMNS * _BYTES
    return "\n".join(
        f"  %{name}.{r}.{c} = getelementptr i8, ptr {base}, i64 {r * _ROWS * width + c * _COLUMNS * _BYTES}"
        for r in range(down)
        for c in range(across)
    )


def _moves(call: str, name: str, down: int, across: int) -> str:
    """Returns the calls that load or store tiles of sums at these places."""
    return "\n".join(
        f"  call void @llvm.x86.{call}(i8 {r * across + c}, ptr %{name}.{r}.{c}, i64 {across * _COLUMNS * _BYTES})"
        for r in range(down)
        for c in range(across)
    )


def _zeros(down: int, across: int) -> str:
    return "\n".join(f"  call void @llvm.x86.tilezero(i8 {register})" for register in range(down * across))


def _loop(name: str, before: str, after: str, down: int, across: int, products: Products) -> str:
    """Returns the block that goes through a chunk of the depth, step by step.

    Args:
        name: Its name.
        before: The block that comes before it.
        after: The one that follows.
        down: Tiles of sums, from above to below.
        across: Tiles of sums, from left to right.
        products: Parts of both panels that are multiplied in a step, in order.
    """
    return f"""
{name}:
  %n.{name} = phi i32 [ 0, %{before} ], [ %next.{name}, %{name} ]
  %l.{name} = phi ptr [ %left, %{before} ], [ %l.next.{name}, %{name} ]
  %r.{name} = phi ptr [ %right, %{before} ], [ %r.next.{name}, %{name} ]
{chr(10).join(_step(name, down, across, products))}
  %l.next.{name} = getelementptr i8, ptr %l.{name}, i64 {PAIRS * _BYTES}
  %r.next.{name} = getelementptr i8, ptr %r.{name}, i64 {PAIRS * across * _COLUMNS * _BYTES}
  %next.{name} = add i32 %n.{name}, 1
  %more.{name} = icmp slt i32 %next.{name}, %steps
  br i1 %more.{name}, label %{name}, label %{after}, !llvm.loop !0
"""


def _step(loop: str, down: int, across: int, products: Products) -> Iterator[str]:
    """Yields a step of the depth: tiles of operands are loaded unless the product before had them, and multiplied."""
    first_left = down * across
    first_right = first_left + down
    before: tuple[int | None, int | None] = None, None
    for left, right in products:
        if left != before[0]:
            at = f"left.{loop}.{left}"
            yield f"  %{at} = getelementptr i8, ptr %l.{loop}, i64 {f'%left.part.{left}' if left else 0}"
            for r in range(down):
                yield f"  %{at}.{r} = getelementptr i8, ptr %{at}, i64 {'%block' if r else 0}"
                yield f"  call void @llvm.x86.tileloadd64(i8 {first_left + r}, ptr %{at}.{r}, i64 %row)"
        if right != before[1]:
            at, width = f"right.{loop}.{right}", across * _COLUMNS * _BYTES
            yield f"  %{at} = getelementptr i8, ptr %r.{loop}, i64 {f'%right.part.{right}' if right else 0}"
            for c in range(across):
                yield f"  %{at}.{c} = getelementptr i8, ptr %{at}, i64 {c * _COLUMNS * _BYTES}"
                yield f"  call void @llvm.x86.tileloadd64(i8 {first_right + c}, ptr %{at}.{c}, i64 {width})"
        for r in range(down):
            for c in range(across):
                registers = f"i8 {r * across + c}, i8 {first_left + r}, i8 {first_right + c}"
                yield f"  call void @llvm.x86.tdpbf16ps({registers})"
        before = left, right
