"""Describes an attention for its kernels: operands, changes of the scores, and the layout of the result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.attention import Attention as Problem
from harness.compiler.schedules.common.folding import Folded
from harness.compiler.schedules.common.kernel import Argument, fp32
from harness.compiler.schedules.common.kernel_info import KernelInfo
from harness.compiler.schedules.cpu.attention.linear_key import WEIGHT, LinearKey
from harness.compiler.schedules.cpu.attention.packing import Rows
from harness.compiler.schedules.cpu.attention.score_mod import Buffers, Head, Position, ScoreMod
from harness.compiler.schedules.cpu.bf16 import BF16, to_bf16
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel

_T = TypeVar("_T")


@dataclass(frozen=True)
class Attention:
    """The problem of a kernel, with its operands.

    Attributes:
        problem: Its sizes.
        query, key, value: The operands, [batch, length, head, channel].
        score_mods: The changes of the scores, one after the other.
        result: For each of batch, length, head and channel, the dimension of the result.
        projected: Whether a projection of the values follows that usually comes before.
        micro_kernel: Micro-kernel of both products.
        stores: Type of the result.
    """

    problem: Problem
    query: Folded
    key: Folded | LinearKey
    value: Folded
    score_mods: tuple[ScoreMod, ...] = ()
    result: tuple[int, ...] = (0, 1, 2, 3)
    projected: bool = False
    micro_kernel: MicroKernel = FP32
    stores: str = "float32"

    @property
    def name(self) -> str:
        """Returns the kernel's name."""
        rounded = "astype" if self.stores == BF16 else ""
        return "_".join(filter(None, ("attention", self.micro_kernel.name, rounded)))

    @property
    def depth(self) -> int:
        """Returns the number of elements of a query, or of a key, that are multiplied."""
        return self.problem.channels // self.micro_kernel.terms

    @property
    def parts(self) -> dict[str, Folded]:
        """Returns what is read from memory by role, in the order of the kernel's parameters."""
        key = self.key.parts if isinstance(self.key, LinearKey) else {"key": self.key}
        parts = {"query": self.query, "key": key["key"], "value": self.value, **key}
        for mod in self.score_mods:
            parts |= mod.parts
        return parts

    @property
    def inputs(self) -> tuple[relax.Expr, ...]:
        """Returns the tensors that are read from memory, in the order of `arguments`."""
        return tuple(value for part in self.parts.values() for value in part.inputs)

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's tensors, the result last."""
        arguments = {role: part.arguments for role, part in self.parts.items()}
        if isinstance(self.key, LinearKey):
            arguments[WEIGHT] = [self.key.packed]
        problem = self.problem
        shape = self._place(problem.batch, problem.queries, problem.heads, problem.width)
        return [
            *(replace(one, name=f"{role}{n}") for role, of_role in arguments.items() for n, one in enumerate(of_role)),
            Argument("result", tuple(shape), self.stores),
        ]

    def by_role(self, values: Sequence[_T]) -> dict[str, list[_T]]:
        """Returns values of the inputs, such as buffers, by role."""
        remaining = iter(values)
        return {role: list(islice(remaining, len(part.inputs))) for role, part in self.parts.items()}

    def query_rows(self, buffers: Buffers, head: Head) -> Rows:
        """Returns the scaled queries of a head."""
        return Rows(self.query, buffers["query"], head, self.problem.scale)

    def key_rows(self, buffers: Buffers, head: Head, first: T.Index, count: T.Index, most: int) -> Rows:
        """Returns keys of a head, after the emission of their layer if they are one.

        Args:
            buffers: The buffers by role.
            head: Batch and head.
            first: The first key that is read.
            count: The number of keys that are read.
            most: Largest number of them.
        """
        if isinstance(self.key, LinearKey):
            return self.key.rows(buffers, head, first, count, most)
        return Rows(self.key, buffers["key"], head)

    def value_rows(self, buffers: Buffers, head: Head) -> Rows:
        """Returns the values of a head."""
        return Rows(self.value, buffers["value"], head)

    def modified(self, buffers: Buffers, position: Position, score: T.Expr) -> T.Expr:
        """Returns the score of a position with all changes; -inf for a masked key."""
        for mod in self.score_mods:
            score = mod.emit(buffers, position, score)
        return score

    def store(
        self, result: T.Buffer, value: T.Expr, weight: T.Expr, head: Head, query: T.Index, channel: T.Index
    ) -> None:
        """Emits the store of a sum of weighted values divided by the sum of the weights; zero if that is zero."""
        b, h = head
        mean = T.Select(T.EQ(weight, fp32(0.0)), fp32(0.0), value / weight)
        T.buffer_store(result, to_bf16(mean) if self.stores == BF16 else mean, self._place(b, query, h, channel))

    def _place(self, b: T.Index, query: T.Index, h: T.Index, channel: T.Index) -> list[T.Index]:
        """Returns the index in the result of an element, or its extents for those of the operands."""
        index = (b, query, h, channel)
        return [index[self.result.index(d)] for d in range(4)]

    def info(self, algorithm: str, decisions: Mapping[str, str | int]) -> KernelInfo:
        """Returns the facts of a kernel with this algorithm and these decisions of its schedule."""
        reads = [operand.operations > 0 for operand in (self.query, self.key, self.value)]
        info = self.problem.info(algorithm, reads)
        known: dict[str, str | int] = {"values": "projected afterwards"} if self.projected else {}
        for mod in self.score_mods:
            known |= mod.decisions
        if isinstance(self.key, LinearKey):
            known["keys"] = "projected while they are packed"
            if info.flop is not None:
                info = replace(info, flop=info.flop + 2 * math.prod(self.key.source.shape) * self.problem.channels)
        return replace(info, decisions={**known, **decisions})
