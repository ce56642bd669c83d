"""Schedules all loops without a kernel of their own, and legalizes elementary functions so that LLVM vectorizes them.

`schedule_remaining` takes the functions that TVM's legalization and fusion leave behind as serial loops over whole
tensors: elementwise and broadcast arithmetic, transpositions, padding, concatenation, gathers, pooling, resizing, small
reductions. It changes the order of loops, it inlines intermediate values (after which LLVM may contract a product and a
sum into one rounding), and it splits long fp32 sums into partial sums; nothing else.

Innermost loops are left to LLVM's vectorizer: it interleaves, handles remainders and predicates, and sees through the
index arithmetic of fused operators, where TVM's explicit vectorization falls back to one scalar at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, sym, te
from tvm.s_tir.schedule import LoopRV, SBlockRV, ScheduleError

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, default, static_shape
from harness.compiler.schedules.common.kernel import replace_loops
from harness.compiler.schedules.common.kernel_info import (
    UNSCHEDULED,
    KernelInfo,
    Kind,
    LostSchedule,
    first_line,
    with_info,
)
from harness.compiler.schedules.cpu import math as elementary

_PARALLEL_FROM = 131072
"""Estimated operations below which starting threads costs more than the work."""
_GRAIN = 4096
"""Elements that one task of a flat loop handles."""
_TASKS = 64
"""Iterations of a parallel loop that are enough."""
_SHORT = 8
"""Innermost loops below this extent are kept together with the loop around them."""
_TILE = 32
"""Largest side of a tile of a transposition: 32 lines of 128 bytes fit the first-level cache many times."""
_VECTOR = 16
"""Number of elements that are stored together; LLVM splits vectors wider than the registers."""
_RUN = 1024
"""Elements from which a run of memory is long enough: LLVM unrolls a short loop instead of vectorizing it."""
_LONG_SUM = 256
"""fp32 sums of more terms than this are split."""
_REUSE = 16
"""Largest number of recomputations of a cheap intermediate value that cost less than storing it."""
_SMALL = 64
"""Largest number of nodes of an expression whose conditions, those of a concatenation or a padding, are cheap."""


@dataclass(frozen=True)
class _Body:
    """The contents of a block's body.

    Attributes:
        loads: (buffer, indices simplified for the extents of the axes) of every load.
        size: Number of nodes.
        costly: Whether there are calls, divisions, or conditions in a large expression, that should not be repeated.
        binds: Whether the body binds variables, which must not be copied within a function.
        moves: Whether the body only moves elements or writes a constant.
    """

    loads: tuple[tuple[T.Buffer, tuple[T.Expr, ...]], ...]
    size: int
    costly: bool
    binds: bool
    moves: bool


@dataclass(frozen=True)
class _Block:
    """A block as the schedule sees it: a perfect nest of loops around one store."""

    handle: SBlockRV
    node: s_tir.SBlock
    loops: tuple[LoopRV, ...]
    extents: tuple[int, ...]
    reduced: tuple[bool, ...]

    @property
    def axes(self) -> list[T.Var]:
        """Returns the variable of each loop."""
        return [axis.var for axis in self.node.iter_vars]

    @property
    def domain(self) -> int:
        """Returns the number of iterations."""
        return math.prod(self.extents)

    @property
    def spatial(self) -> bool:
        """Returns whether every iteration writes an element of its own."""
        return not any(self.reduced)

    @property
    def outer(self) -> list[LoopRV]:
        """Returns the loops that are not reduced."""
        return [loop for loop, reduced in zip(self.loops, self.reduced, strict=True) if not reduced]

    @property
    def inner(self) -> list[LoopRV]:
        """Returns the loops that are reduced."""
        return [loop for loop, reduced in zip(self.loops, self.reduced, strict=True) if reduced]

    @property
    def terms(self) -> int:
        """Returns the number of iterations that are reduced to one element."""
        return math.prod(extent for extent, reduced in zip(self.extents, self.reduced, strict=True) if reduced)

    @cached_property
    def body(self) -> _Body:
        """Returns the contents of the body."""
        return _examine(self)

    @property
    def worthwhile(self) -> bool:
        """Returns whether threads are worth being started."""
        return self.domain * (max(1, self.body.size // 8) if self.spatial else 1) >= _PARALLEL_FROM


_CONDITION = "prim.if_then_else"
_FREE = {"prim.likely", "tirx.reinterpret", "tirx.fma"}


def _examine(block: _Block) -> _Body:
    loads: list[tuple[T.Buffer, tuple[T.Expr, ...]]] = []
    counts = {"size": 0, "costly": 0, "conditions": 0, "binds": 0}
    analyzer = sym.Analyzer()
    for axis, extent in zip(block.node.iter_vars, block.extents, strict=True):
        analyzer.bind(axis.var, ir.Range(0, extent))

    def visit(node: object) -> None:
        counts["size"] += 1
        if isinstance(node, T.TensorLoad):
            loads.append((node.source, tuple(analyzer.simplify(index) for index in node.indices)))
        elif isinstance(node, T.Let):
            counts["binds"] += 1
        elif isinstance(node, ir.Call) and getattr(node.op, "name", "") == _CONDITION:
            counts["conditions"] += 1
        elif (isinstance(node, ir.Call) and getattr(node.op, "name", "") not in _FREE) or (
            isinstance(node, T.Div) and str(node.ty) == "float32"
        ):
            counts["costly"] += 1

    tvm_ffi.structural_walk(block.node.body, visit)
    value = getattr(block.node.body, "value", None)
    moves = isinstance(value, T.TensorLoad | T.IntImm | T.FloatImm)
    costly = counts["costly"] > 0 or (counts["conditions"] > 0 and counts["size"] > _SMALL)
    return _Body(tuple(loads), counts["size"], costly, counts["binds"] > 0, moves)


def _block(sch: s_tir.Schedule, handle: SBlockRV) -> _Block | None:
    """Returns the block if it has constant extents and one loop per axis, all still serial; otherwise None."""
    nodes = [sch.get(loop) for loop in sch.get_loops(handle)]
    if not _is_nest(sch.get(handle), nodes) or not all(isinstance(n.extent, T.IntImm) for n in nodes):
        return None
    node, loops = sch.get(handle), tuple(sch.get_loops(handle))
    reduced = tuple(axis.iter_type == T.IterVar.CommReduce for axis in node.iter_vars)
    return _Block(handle, node, loops, tuple(int(n.extent) for n in nodes), reduced)


def _is_nest(node: s_tir.SBlock, loops: Sequence[T.For]) -> bool:
    """Returns whether a block has one loop per axis, in a perfect nest of serial loops."""
    kinds = [axis.iter_type for axis in node.iter_vars]
    if len(loops) != len(kinds) or not set(kinds) <= {T.IterVar.DataPar, T.IterVar.CommReduce}:
        return False
    if any(n.kind != T.ForKind.SERIAL or isinstance(n.body, T.SeqStmt) for n in loops):
        return False
    realize = loops[-1].body if loops else None
    if not isinstance(realize, s_tir.SBlockRealize):
        return False
    return all(value.same_as(n.loop_var) for value, n in zip(realize.iter_values, loops, strict=True))


def _schedule_symbolic(sch: s_tir.Schedule, handle: SBlockRV) -> bool:
    """Makes the first loop that is longer than one parallel, if every iteration writes an element of its own.

    It is for blocks with symbolic extents; False where nothing was done.
    """
    node, loops = sch.get(handle), sch.get_loops(handle)
    nodes = [sch.get(loop) for loop in loops]
    spatial = all(axis.iter_type == T.IterVar.DataPar for axis in node.iter_vars)
    if not spatial or not _is_nest(node, nodes):
        return False
    sch.parallel(next(loop for loop, n in zip(loops, nodes, strict=True) if not _is_one(n.extent)))
    return True


def _inline(sch: s_tir.Schedule, handles: Sequence[SBlockRV]) -> list[LostSchedule]:
    """Inlines intermediate elementwise blocks, unless that repeats costly work; returns those that TVM refuses."""
    lost: list[LostSchedule] = []
    outputs = {sch.get(handle).name_hint for handle in sch.get_output_blocks(sch.get_sblock("root"))}
    for handle in handles:
        block = _block(sch, handle)
        if (
            block is None
            or not block.domain
            or not block.spatial
            or block.node.name_hint in outputs
            or len(block.node.writes) != 1
        ):
            continue
        body = block.body
        found = [_block(sch, consumer) for consumer in sch.get_consumers(handle)]
        consumers = [consumer for consumer in found if consumer is not None]
        if not consumers or len(consumers) < len(found):
            continue
        buffer = block.node.writes[0].source
        places = [sum(source.same_as(buffer) for source, _ in consumer.body.loads) for consumer in consumers]
        repeats = sum(n * consumer.domain for n, consumer in zip(places, consumers, strict=True)) / block.domain
        if body.binds and sum(places) > 1:
            continue
        if not body.moves and repeats > (1 if body.costly or body.binds else _REUSE):
            continue
        try:
            sch.compute_inline(handle)
        except ScheduleError as error:
            lost.append(LostSchedule("inline", first_line(error), str(block.node.name_hint)))
    return lost


def _divisor(number: int, limit: int, multiple: int = 1) -> int:
    """Returns the largest divisor of `number` up to `limit` that is a multiple of `multiple`; 1 if there is none."""
    return next((d for d in range(min(limit, number), 1, -1) if number % d == 0 and d % multiple == 0), 1)


def _joined(block: _Block) -> int:
    """Counts the innermost loops that are one loop to every tensor.

    Such loops walk a run of memory of each tensor that depends on any of them.
    """
    store = block.node.body
    if not isinstance(store, T.BufferStore):
        return 1
    accesses = [(store.buffer, tuple(store.indices)), *block.body.loads]
    axes = block.axes
    if _computed_with(store.value, axes):
        return 1
    count = 1
    while count < len(axes) and all(_is_run(block, axes[-count - 1 :], *access) for access in accesses):
        count += 1
    return count


def _is_run(block: _Block, axes: Sequence[T.Var], buffer: T.Buffer, indices: Sequence[T.Expr]) -> bool:
    """Returns whether an access depends on none of the innermost axes, or walks a run of memory with all of them."""
    extents = block.extents[-len(axes) :]
    wide = [(axis, extent) for axis, extent in zip(axes, extents, strict=True) if extent > 1]
    if not any(axis.same_as(used) for index in indices for used in _variables(index) for axis, _ in wide):
        return True
    places = [(index, extent) for index, extent in zip(indices, buffer.shape, strict=True) if not _is_one(extent)]
    return len(places) >= len(wide) and all(
        index.same_as(axis) and isinstance(extent, T.IntImm) and int(extent) == loop
        for (index, extent), (axis, loop) in zip(places[len(places) - len(wide) :], wide, strict=True)
    )


def _computed_with(value: T.Expr, axes: Sequence[T.Var]) -> bool:
    """Returns whether a value depends on an axis beyond its loads: joined loops would have to divide."""
    loads: list[T.TensorLoad] = []
    tvm_ffi.structural_walk(value, lambda node: loads.append(node) if isinstance(node, T.TensorLoad) else None)
    indices = [variable for load in loads for index in load.indices for variable in _variables(index)]
    return any(
        sum(axis.same_as(variable) for variable in _variables(value))
        > sum(axis.same_as(variable) for variable in indices)
        for axis in axes
    )


def _variables(expression: T.Expr) -> list[T.Var]:
    variables: list[T.Var] = []
    tvm_ffi.structural_walk(expression, lambda node: variables.append(node) if isinstance(node, T.Var) else None)
    return variables


def _is_one(extent: T.Expr) -> bool:
    return isinstance(extent, T.IntImm) and int(extent) == 1


def _transposed_axis(block: _Block) -> int | None:
    """Returns the axis along which some operand is contiguous, if that is not the last one."""
    *outer, innermost = block.axes
    for _, indices in block.body.loads:
        if len(indices) < 2:
            continue
        *around, last = indices
        for n, axis in enumerate(outer):
            if last.same_as(axis) and any(_follows(index, innermost) for index in around):
                return n
    return None


def _follows(index: T.Expr, axis: T.Var) -> bool:
    """Returns whether an index is a sum of multiples of axes that grows by one with this axis."""
    if not _is_affine(index) or not any(axis.same_as(variable) for variable in _variables(index)):
        return False
    following = tvm_ffi.structural_map(
        index, (T.Var, lambda variable: axis + 1 if axis.same_as(variable) else variable)
    )
    return bool(sym.Analyzer().can_prove_equal(following - index, 1))


def _is_affine(index: T.Expr) -> bool:
    """Returns whether an index is made of axes and numbers by sums and products alone."""
    if isinstance(index, T.Add | T.Mul):
        return _is_affine(index.a) and _is_affine(index.b)
    return isinstance(index, T.Var | T.IntImm)


def _parallel(sch: s_tir.Schedule, block: _Block, loops: Sequence[LoopRV]) -> None:
    if loops and block.worthwhile:
        sch.parallel(sch.fuse(*loops) if len(loops) > 1 else loops[0])


def _schedule(sch: s_tir.Schedule, block: _Block) -> str | LostSchedule:
    """Schedules a block; the name of the schedule, or the one that TVM refuses, which leaves loops half changed."""
    for name, schedule in (_SPATIAL if block.spatial else _REDUCTIONS).items():
        try:
            if schedule(sch, block):
                return name
        except ScheduleError as error:
            return LostSchedule(name, first_line(error), str(block.node.name_hint))
    raise AssertionError("the last schedule takes every block")


def _flat(sch: s_tir.Schedule, block: _Block) -> bool:
    """Schedules runs of memory as tasks of about equal length, each a loop over whole innermost lines.

    A run that began or ended within a line would leave TVM with divisions in every iteration.
    """
    if _joined(block) < len(block.loops):
        return False
    short = [loop for loop, extent in zip(block.loops, block.extents, strict=True) if extent == 1]
    loops = [loop for loop, extent in zip(block.loops, block.extents, strict=True) if extent > 1]
    extents = [extent for extent in block.extents if extent > 1]
    if not loops:
        return True
    count = next((n for n in range(1, len(loops)) if math.prod(extents[-n:]) >= _GRAIN), len(loops))
    line = math.prod(extents[-count:][1:])
    lines = _divisor(extents[-count], _GRAIN // line, 16 // math.gcd(16, line))
    if lines * line < 64:
        lines = _divisor(extents[-count], _GRAIN // line)
    if lines * line < 64:
        return len(block.loops) == 1
    if short:
        sch.reorder(*short, *loops)
    outer, inner = sch.split(loops[-count], [None, lines])
    if count > 1:
        sch.fuse(inner, *loops[len(loops) - count + 1 :])
    _parallel(sch, block, [*loops[:-count], outer])
    return True


def _tiled(sch: s_tir.Schedule, block: _Block) -> bool:
    """Schedules a transposition that changes the contiguous axis in square tiles: whole cache lines on both sides.

    Where no index has a division, vectors are put together from elements and stored whole: LLVM would load vectors and
    scatter them, which takes several times as long.
    """
    crossed = _transposed_axis(block)
    if crossed is None:
        return False
    rows, columns = (_divisor(block.extents[n], _TILE) for n in (crossed, -1))
    if rows < 4 or columns < 4:
        return False
    row, row_inner = sch.split(block.loops[crossed], [None, rows])
    column, column_inner = sch.split(block.loops[-1], [None, columns])
    around = [loop for n, loop in enumerate(block.loops[:-1]) if n != crossed]
    sch.reorder(*around, row, column, row_inner, column_inner)
    _parallel(sch, block, [*around, row])
    width = math.gcd(columns, _VECTOR)
    plain = all(_is_affine(index) for _, indices in block.body.loads for index in indices)
    if width >= 4 and plain and not block.body.binds:
        sch.vectorize(sch.split(column_inner, [None, width])[1])
    return True


def _rows(sch: s_tir.Schedule, block: _Block) -> bool:
    """Makes everything parallel but the innermost loop, which is unrolled where it repeats elements."""
    loops, extents = list(block.loops), list(block.extents)
    repeat = _repetition(block)
    longest = _joined(block)
    count = next((n for n in range(1, longest) if math.prod(extents[-n:]) >= _RUN), longest)
    if count > 1:
        loops[-count:] = [sch.fuse(*loops[-count:])]
        extents[-count:] = [math.prod(extents[-count:])]
        repeat = 1
    keep = 1
    while keep < len(loops) - 1 and math.prod(extents[-keep:]) < _SHORT:
        keep += 1
    outer_loops = loops[:-keep]
    inner = loops[-1]
    if math.prod(extents[:-keep]) < 2 and block.worthwhile:
        grain = _divisor(extents[-keep], _GRAIN, 16)
        if 1 < grain < extents[-keep]:
            outer, rest = sch.split(loops[-keep], [None, grain])
            outer_loops = [*outer_loops, outer]
            inner = rest if keep == 1 else inner
            repeat = repeat if keep > 1 or grain % repeat == 0 else 1
    if repeat > 1:
        _, copies = sch.split(inner, [None, repeat])
        sch.unroll(copies)
    _parallel(sch, block, _enough(sch, outer_loops))
    return True


def _enough(sch: s_tir.Schedule, loops: Sequence[LoopRV]) -> list[LoopRV]:
    """Returns as many outer loops as make enough tasks: fused indices cost divisions in every iteration."""
    extents = [int(sch.get(loop).extent) for loop in loops]
    loop_count = next((n for n in range(1, len(loops)) if math.prod(extents[:n]) >= _TASKS), len(loops))
    return list(loops[:loop_count])


def _repetition(block: _Block) -> int:
    """Counts the neighbours along the last axis that read one element; 1 unless a small divisor of the extent."""
    last = block.axes[-1]
    axes: set[int] = set()

    def visit(node: object) -> None:
        if isinstance(node, T.FloorDiv) and node.a.same_as(last) and isinstance(node.b, T.IntImm):
            axes.add(int(node.b))

    for _, indices in block.body.loads:
        for index in indices:
            tvm_ffi.structural_walk(index, visit)
    repeat = min(axes, default=1)
    return repeat if 1 < repeat <= _SHORT and block.extents[-1] % repeat == 0 else 1


def _split_sum(sch: s_tir.Schedule, block: _Block) -> bool:
    """Splits a long sum into partial sums that are added afterwards; returns False if it is not split."""
    store, terms, outer, inner = block.node.body, block.terms, block.outer, block.inner
    is_sum = isinstance(store, T.BufferStore) and isinstance(store.value, T.Add)
    if terms <= _LONG_SUM or not is_sum or str(store.buffer.dtype) != "float32":
        return False
    lanes = _divisor(terms, 4 * math.isqrt(terms), 16)
    if lanes == 1:
        lanes = _divisor(terms, 4 * math.isqrt(terms))
    if lanes < 4:
        return False
    sch.reorder(*outer, *inner)
    line = sch.fuse(*inner) if len(inner) > 1 else inner[0]
    _, lane = sch.split(line, [None, lanes])
    partial = sch.rfactor(lane, len(outer))
    *around, step, lane = sch.get_loops(partial)
    if around:
        _parallel(sch, block, around)
    elif block.worthwhile:
        sch.reorder(lane, step)
        sch.parallel(lane)
    _parallel(sch, block, sch.get_loops(block.handle)[: len(outer)])
    return True


def _reduce(sch: s_tir.Schedule, block: _Block) -> bool:
    """Makes the loops that are not reduced, which come first, parallel."""
    outer = block.outer
    sch.reorder(*outer, *block.inner)
    _parallel(sch, block, outer)
    return True


_SPATIAL = {"flat": _flat, "tiled": _tiled, "rows": _rows}
_REDUCTIONS = {"split reduction": _split_sum, "reduction": _reduce}
"""Schedules of a block by name, in the order of trial; each returns whether it was applied."""


def schedule_function(function: T.PrimFunc) -> T.PrimFunc:
    """Puts the loops of a function in a good order for a CPU; it is unchanged where nothing is known to help.

    The facts of the result name the schedule of each block, and those that could not be applied.
    """
    root = function.body
    if not isinstance(root, s_tir.SBlockRealize) or root.block.name_hint != "root":
        return function
    sch = s_tir.Schedule(function)
    handles = sch.get_child_blocks(sch.get_sblock("root"))
    if not handles:
        return function
    lost = _inline(sch, handles)
    chosen: list[str] = []
    for name in [str(sch.get(handle).name_hint) for handle in sch.get_child_blocks(sch.get_sblock("root"))]:
        handle = sch.get_sblock(name)
        block = _block(sch, handle)
        if block is None and _schedule_symbolic(sch, handle):
            chosen.append("symbolic extents, the first in parallel")
            continue
        if block is None:
            lost.append(LostSchedule("of plain loops", "it is not a perfect nest of serial loops", name))
            chosen.append(UNSCHEDULED)
            continue
        if not block.domain:  # of an empty tensor: TVM divides by the extents of loops that it fuses
            chosen.append(UNSCHEDULED)
            continue
        saved = sch.copy()
        schedule = _schedule(sch, block)
        if isinstance(schedule, LostSchedule):
            lost.append(schedule)
            chosen.append(UNSCHEDULED)
            sch = saved
        else:
            chosen.append(schedule)
    info = KernelInfo(Kind.LOOPS, schedules=tuple(chosen), lost=tuple(lost))
    return with_info(sch.mod["main"].with_attr("tirx.is_scheduled", True), info)


@tvm.transform.module_pass(opt_level=0, name="ScheduleRemaining")
def schedule_remaining(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Gives every function without a schedule a good default one.

    Functions with the attribute `tirx.is_scheduled` and kernels written as plain loops (no blocks) stay as they are.
    A block that cannot be scheduled is left alone, and the facts of its function tell why.
    """
    return replace_loops(module, lambda _, function: schedule_function(function))


def _unary(function: Callable[[T.Expr], T.Expr], name: str) -> Legalize:
    """Makes a legalization of an elementwise TE function, which FuseOps can fuse."""

    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        data = node.args[0]
        if static_shape(data) is None:
            return default(bb, node)

        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *index: function(x(*index)), name=name)

        info = KernelInfo(Kind.LEGALIZATION, name)
        return bb.call_te(compute, data, primfunc_name_hint=f"tir_{name}", primfunc_attrs=info.attributes)

    return legalize


_POWERS: dict[float, Callable[[T.Expr], T.Expr]] = {
    0.5: T.sqrt,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: lambda x: T.const(1.0, "float32") / x,
    -0.5: lambda x: T.const(1.0, "float32") / T.sqrt(x),
}


def _power(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    """Legalizes powers with a constant exponent without a call of `powf`, as PyTorch does."""
    exponent = node.args[1]
    if isinstance(exponent, ir.Constant) and not static_shape(exponent, dtype=None):
        function = _POWERS.get(float(exponent.value.numpy()))
        if function is not None and static_shape(node.args[0]) == static_shape(node):
            return _unary(function, "power")(bb, node)
    return default(bb, node)


LEGALIZE: dict[str, Legalize] = {
    "relax.exp": _unary(elementary.exp, "exp"),
    "relax.log": _unary(elementary.log, "log"),
    "relax.sin": _unary(elementary.sin, "sin"),
    "relax.cos": _unary(elementary.cos, "cos"),
    "relax.erf": _unary(elementary.erf, "erf"),
    "relax.sigmoid": _unary(elementary.sigmoid, "sigmoid"),
    "relax.nn.gelu": _unary(elementary.gelu, "gelu"),
    "relax.nn.silu": _unary(elementary.silu, "silu"),
    "relax.power": _power,
}
"""Legalizations of fp32 elementary functions, by operator."""
