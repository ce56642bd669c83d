"""Folds an axial bias of attention: the sum of a number for the line and a number for the column of a key.

    bias[b, h, query, key] = lines[b, h, query, key // width] + columns[b, h, query, key % width]

SAM 3's decoder adds such a bias, from where the pixels of the image lie in relation to the box of a query, and writes
it out for all pixels. It is never whole here: a block of queries needs one row for each line and column of the image,
with its queries side by side as those of the scores are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, broadcast, fold
from harness.compiler.schedules.common.graph import is_call, number, static_shape
from harness.compiler.schedules.common.kernel import fp32
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.attention.score_mod import Buffers, Head, Position, ScoreMod

_MOVES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.permute_dims", "relax.broadcast_to")
_LEAST_REUSE = 8
"""Least number of reads of a number for which this pays."""


@dataclass(frozen=True)
class AxialBias(ScoreMod):
    """The parts of an axial bias.

    Attributes:
        lines: The part that depends on the line of a key, as a bias [batch, head, query, key].
        columns: The part that depends on its column.
        width: Keys of a line.
    """

    lines: Folded
    columns: Folded
    width: int

    @property
    def parts(self) -> dict[str, Folded]:
        """Returns both parts."""
        return {"lines": self.lines, "columns": self.columns}

    @property
    def decisions(self) -> dict[str, str]:
        """Returns what a kernel's facts say about it."""
        return {"bias": "added up from the lines and columns of an image"}

    @property
    def height(self) -> int:
        """Returns the number of lines of the image."""
        return int(self.lines.shape[3]) // self.width

    def allocated(self, blocks: int, columns: int) -> Buffers:
        """Emits the allocation of a row for each line and column of the image, [block, row, query]."""
        return {"rows": [T.alloc_buffer((blocks, self.height + self.width, columns), "float32")]}

    def fill(self, buffers: Buffers, head: Head, block: T.Index, first: T.Expr) -> None:
        """Emits the rows of a block of queries; the last query is repeated beyond the edge."""
        (rows,) = buffers["rows"]
        starts = {"lines": (0, self.height, self.width), "columns": (self.height, self.width, 1)}
        for role, part in self.parts.items():
            start, count, step = starts[role]
            with T.serial(0, count) as n, T.serial(0, int(rows.shape[2])) as j:
                query = T.Bind(T.min(first + j, int(part.shape[2]) - 1))
                analyzer = sym.Analyzer()
                for variable, extent in zip((*head, query, n), (*part.shape[:3], count), strict=True):
                    analyzer.bind(variable, ir.Range(0, extent))
                value = broadcast(part, part.reader(buffers[role], analyzer), [*head, query, n * step])
                T.buffer_store(rows, value, [block, start + n, j])

    def emit(self, buffers: Buffers, position: Position, score: T.Expr) -> T.Expr:
        """Returns the score with the bias."""
        (rows,), block, j = buffers["rows"], position.block, position.column
        line, column = position.key // self.width, self.height + position.key % self.width
        return score + (rows[block, line, j] + rows[block, column, j])


def axial_bias(scope: Scope, bias: relax.Expr) -> AxialBias | None:
    """Returns the parts of a bias [batch, head, query, key]; None if it is not axial."""
    shape = static_shape(bias)
    total, zeros = _sum_behind(scope, bias)
    if shape is None or total is None:
        return None
    operands = scope.definition(total).args
    if any(static_shape(value) is None for value in (total, *operands)):
        return None
    one, other = (_instead(scope, bias, total, operand, zeros) for operand in operands)
    for width in sorted(set(static_shape(total) or ())):
        if shape[3] % width or _LEAST_REUSE * (shape[3] // width + width) > shape[3]:
            continue
        for lines, columns in ((one, other), (other, one)):
            if not _depends(lines, width, on="column") and not _depends(columns, width, on="line"):
                return AxialBias(lines, columns, width)
    return None


def _sum_behind(scope: Scope, bias: relax.Expr) -> tuple[relax.Var | None, list[relax.Var]]:
    """Returns the sum behind the moves of a bias, None if there is not exactly one, and the zeros beside it."""
    waiting: list[relax.Expr] = [bias]
    sums: list[relax.Var] = []
    zeros: list[relax.Var] = []
    while waiting:
        value = waiting.pop()
        definition = scope.definition(value)
        if not isinstance(value, relax.Var) or value in scope.results:
            return None, []
        if is_call(definition, *_MOVES):
            waiting.append(definition.args[0])
        elif is_call(definition, "relax.concat"):
            parts = scope.definition(definition.args[0])
            if not isinstance(parts, relax.Tuple):
                return None, []
            waiting.extend(parts.fields)
        elif is_call(definition, "relax.add"):
            sums.append(value)
        elif _is_zero(definition):
            zeros.append(value)
        else:
            return None, []
    return (sums[0], zeros) if len(sums) == 1 else (None, [])


def _is_zero(definition: relax.Expr) -> bool:
    """Returns whether this is a tensor of zeros."""
    if is_call(definition, "relax.full", "relax.full_like"):
        return number(definition.args[1]) == 0.0
    return is_call(definition, "relax.zeros", "relax.zeros_like")


def _instead(
    scope: Scope, bias: relax.Expr, total: relax.Var, operand: relax.Expr, zeros: Sequence[relax.Var]
) -> Folded:
    """Follows a bias as if one operand of the sum that it consists of were the sum."""
    part = fold(scope, operand)
    known = {value: Folded((), static_shape(value) or (), lambda reader, index: fp32(0.0)) for value in zeros}
    known[total] = replace(
        part, shape=static_shape(total) or (), element=lambda reader, index: broadcast(part, reader, index), period=1
    )
    # A bias that depends on weights alone is followed, too: its parts are smaller to keep.
    return fold(replace(scope, known=known, parameters=frozenset()), bias)


def _depends(part: Folded, width: int, on: str) -> bool:
    """Returns whether a part depends on the column of a key, or on its line, as far as indices can be simplified."""
    batch, heads, queries, keys = part.shape
    names = {"b": batch, "h": heads, "query": queries, "line": keys // width, "column": width}
    index = {name: T.Var(name, "int32") for name in names}
    analyzer = sym.Analyzer()
    for name, extent in names.items():
        analyzer.bind(index[name], ir.Range(0, extent))
    key = index["line"] * width + index["column"]
    place = [index["b"], index["h"], index["query"], key]
    value = analyzer.simplify(part.element(part.placeholders(analyzer), place))
    return any(index[on].same_as(variable) for variable in T.analysis.undefined_vars(value))
