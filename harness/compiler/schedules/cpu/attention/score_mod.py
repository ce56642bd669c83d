"""Provides the changes of attention's scores, which FlexAttention calls `score_mod`: biases, masks and diagonals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import extents
from harness.compiler.schedules.common.kernel import Argument, fp32

Head = tuple[T.Expr, T.Expr]
"""Batch and number of a head."""


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

    role: ClassVar[str] = ""
    """Role of its tensors among a kernel's inputs."""

    @property
    def inputs(self) -> tuple[relax.Expr, ...]:
        """Returns the tensors that are read from memory, in the order of `arguments`."""
        return ()

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's parameters for the inputs."""
        return []

    @property
    def decisions(self) -> dict[str, str]:
        """Returns what a kernel's facts say about it."""
        return {}

    def allocated(self, buffers: Sequence[T.Buffer], blocks: int, columns: int) -> Sequence[T.Buffer]:
        """Emits the allocation of what is kept for blocks of queries; returns the buffers that `emit` reads."""
        return buffers

    def fill(
        self, source: Sequence[T.Buffer], buffers: Sequence[T.Buffer], head: Head, block: T.Index, first: T.Expr
    ) -> None:
        """Emits the preparation of a block of queries.

        Args:
            source: The buffers of the inputs.
            buffers: Those that `allocated` returned.
            head: Batch and head.
            block: Number of the block.
            first: Its first query.
        """

    def emit(self, buffers: Sequence[T.Buffer], position: Position, score: T.Expr) -> T.Expr:
        """Returns the changed score; -inf for a masked key."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bias(ScoreMod):
    """A tensor that broadcasts to [batch, head, query, key]: fp32 is added, and false in a bool masks a key out."""

    role = "bias"
    tensor: relax.Expr

    @property
    def inputs(self) -> tuple[relax.Expr, ...]:
        """Returns the tensor."""
        return (self.tensor,)

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's parameter for it."""
        return [Argument("bias", extents(self.tensor) or (), str(self.tensor.ty.dtype))]

    def emit(self, buffers: Sequence[T.Buffer], position: Position, score: T.Expr) -> T.Expr:
        """Returns the score with the bias, or masked."""
        (bias,) = buffers
        (argument,) = self.arguments
        index = [0 if extent == 1 else i for extent, i in zip(argument.shape, position[:4], strict=True)]
        stored = bias[tuple(index)]
        return T.Select(stored, score, fp32(-math.inf)) if argument.dtype == "bool" else score + stored


@dataclass(frozen=True)
class Diagonal(ScoreMod):
    """A causal mask: query i sees keys up to i + offset."""

    role = "diagonal"
    offset: T.Index

    def emit(self, buffers: Sequence[T.Buffer], position: Position, score: T.Expr) -> T.Expr:
        """Returns the score, masked behind the diagonal."""
        return T.Select(position.key <= position.query + self.offset, score, fp32(-math.inf))
