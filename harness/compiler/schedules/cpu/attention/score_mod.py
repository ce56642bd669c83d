"""Provides the changes of attention's scores, which FlexAttention calls `score_mod`: biases, masks and diagonals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm import sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, broadcast
from harness.compiler.schedules.common.kernel import fp32

Head = tuple[T.Expr, T.Expr]
"""Batch and number of a head."""
Buffers = Mapping[str, Sequence[T.Buffer]]
"""The buffers of a kernel's inputs, and of what score changes keep, by role."""


def finite(score: T.Expr) -> T.Expr:
    """Returns a highest score, and 0 for -inf: exp(-inf - -inf) would be NaN where every key is masked."""
    return T.Select(T.EQ(score, fp32(-math.inf)), fp32(0.0), score)


class Position(NamedTuple):
    """The place of a score: batch, head, query and key, and its query's block and number in the block."""

    batch: T.Index
    head: T.Index
    query: T.Index
    key: T.Index
    block: T.Index = 0
    column: T.Index = 0


@dataclass(frozen=True)
class ScoreMod:
    """A change of scores by their positions."""

    @property
    def parts(self) -> dict[str, Folded]:
        """Returns the tensors that it reads, by role."""
        return {}

    @property
    def decisions(self) -> dict[str, str]:
        """Returns what a kernel's facts say about it."""
        return {}

    def allocated(self, blocks: int, columns: int) -> Buffers:
        """Emits the allocation of what is kept for blocks of so many queries; returns it by role."""
        return {}

    def fill(self, buffers: Buffers, head: Head, block: T.Index, first: T.Expr) -> None:
        """Emits what is kept for a block of queries, whose first one is given."""

    def emit(self, buffers: Buffers, position: Position, score: T.Expr) -> T.Expr:
        """Returns the changed score; -inf for a masked key."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bias(ScoreMod):
    """A tensor that broadcasts to [batch, head, query, key].

    Attributes:
        tensor: The tensor.
        masks: Whether it is boolean, and false masks a key out; it is added otherwise.
    """

    tensor: Folded
    masks: bool

    @property
    def parts(self) -> dict[str, Folded]:
        """Returns the tensor."""
        return {"bias": self.tensor}

    def emit(self, buffers: Buffers, position: Position, score: T.Expr) -> T.Expr:
        """Returns the score with the bias, or masked."""
        bias = broadcast(self.tensor, self.tensor.reader(buffers["bias"], sym.Analyzer()), position[:4])
        return T.Select(bias, score, fp32(-math.inf)) if self.masks else score + bias


@dataclass(frozen=True)
class Diagonal(ScoreMod):
    """A causal mask: query i sees keys up to i + offset."""

    offset: T.Index

    def emit(self, buffers: Buffers, position: Position, score: T.Expr) -> T.Expr:
        """Returns the score, masked behind the diagonal."""
        return T.Select(position.key <= position.query + self.offset, score, fp32(-math.inf))
