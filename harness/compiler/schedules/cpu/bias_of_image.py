"""Folds an axial bias of attention: the sum of a number for the line and a number for the column of a key.

    bias[b, h, query, key] = lines[b, h, query, key // width] + columns[b, h, query, key % width]

SAM 3's decoder adds such a bias, from where the pixels of the image lie in relation to the box of a query, and writes
it out for all pixels. It is never whole here: a block of queries needs one row for each line and column of the image,
with its queries side by side as those of the scores are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, Reader, broadcast, fold
from harness.compiler.schedules.common.graph import is_call, number, static_shape
from harness.compiler.schedules.common.kernel import Argument, fp32
from harness.compiler.schedules.common.scope import Scope

_MOVES = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.permute_dims", "relax.broadcast_to")
_LEAST_REUSE = 8
"""Least number of reads of a number for which this pays."""


@dataclass(frozen=True)
class AxialBias:
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
    def inputs(self) -> tuple[relax.Expr, ...]:
        """Returns the tensors that are read from memory, in the order of `arguments`."""
        return (*self.lines.inputs, *self.columns.inputs)

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's parameters for the inputs."""
        return [
            replace(argument, name=f"{name}_{argument.name}")
            for name, part in (("lines", self.lines), ("columns", self.columns))
            for argument in part.arguments
        ]

    @property
    def height(self) -> int:
        """Returns the number of lines of the image."""
        return int(self.lines.shape[3]) // self.width

    @property
    def rows(self) -> int:
        """Returns the number of rows that a block of queries needs."""
        return self.height + self.width

    def fill(self, buffers: Sequence[T.Buffer], head: tuple[T.Var, T.Var], q: Any, first: Any, rows: T.Buffer) -> None:
        """Emits rows[q, :, query] for the queries from a first one on; the last one is repeated beyond the edge.

        Args:
            buffers: The buffers of the inputs.
            head: Batch and head.
            q: Number of the block of queries.
            first: Its first query.
            rows: [block, row, query].
        """
        columns = int(rows.shape[2])

        def fill_part(part: Folded, sources: Sequence[T.Buffer], start: int, count: int, step: int) -> None:
            queries = int(part.shape[2])
            with T.serial(0, count) as n, T.serial(0, columns) as j:
                query = T.Bind(T.min(first + j, queries - 1))
                analyzer = sym.Analyzer()
                for variable, extent in zip((*head, query, n), (*part.shape[:3], count), strict=True):
                    analyzer.bind(variable, ir.Range(0, extent))
                value = broadcast(part, Reader(sources, analyzer), [*head, query, n * step])
                T.buffer_store(rows, value, [q, start + n, j])

        line_count = len(self.lines.inputs)
        fill_part(self.lines, buffers[:line_count], 0, self.height, self.width)
        fill_part(self.columns, buffers[line_count:], self.height, self.width, 1)

    def value(self, rows: T.Buffer, q: Any, j: Any, key: Any) -> Any:
        """Returns the bias of a key and of a query, or of several, of a block."""
        return rows[q, key // self.width, j] + rows[q, self.height + key % self.width, j]


def bias_of_image(scope: Scope, bias: relax.Expr | None) -> AxialBias | None:
    """Returns the parts of a bias [batch, head, query, key]; None if it is not axial."""
    shape = None if bias is None else static_shape(bias)
    if bias is None or shape is None or len(shape) != 4:
        return None
    sum_found = _sum_behind(scope, bias)
    if sum_found is None:
        return None
    total, zeros = sum_found
    whole = static_shape(total)
    operands = scope.definition(total).args
    if whole is None or any(static_shape(operand) is None for operand in operands):
        return None
    one, other = (_instead(scope, bias, total, operand, zeros) for operand in operands)
    for width in sorted(set(whole)):
        if shape[3] % width or _LEAST_REUSE * (shape[3] // width + width) > shape[3]:
            continue
        for lines, columns in ((one, other), (other, one)):
            if not _depends(lines, width, on="column") and not _depends(columns, width, on="line"):
                return AxialBias(lines, columns, width)
    return None


def _sum_behind(scope: Scope, bias: relax.Expr) -> tuple[relax.Var, list[relax.Var]] | None:
    """Returns the sum behind the moves of a bias, and the zeros added to it; None if there is no sum."""
    waiting: list[relax.Expr] = [bias]
    sums, zeros = [], []
    while waiting:
        value = waiting.pop()
        if not isinstance(value, relax.Var) or value in scope.results:
            return None
        definition: Any = scope.definition(value)
        if is_call(definition, *_MOVES):
            waiting.append(definition.args[0])
        elif is_call(definition, "relax.concat"):
            parts = scope.definition(definition.args[0])
            if not isinstance(parts, relax.Tuple):
                return None
            waiting.extend(parts.fields)
        elif is_call(definition, "relax.add"):
            sums.append(value)
        elif _is_zero(definition):
            zeros.append(value)
        else:
            return None
    return (sums[0], zeros) if len(sums) == 1 else None


def _is_zero(definition: Any) -> bool:
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
    buffers = [T.buffer(argument.shape, argument.dtype) for argument in part.arguments]
    key = index["line"] * width + index["column"]
    value = analyzer.simplify(part.element(Reader(buffers, analyzer), [index["b"], index["h"], index["query"], key]))
    return any(index[on].same_as(variable) for variable in T.analysis.undefined_vars(value))
