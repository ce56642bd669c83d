"""What an attention is made of: its operands, how its scores are biased and masked, where its result goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.common import kernel_info
from harness.schedules.common.folding import Folded
from harness.schedules.common.graph import extents
from harness.schedules.common.kernel import Argument, fp32
from harness.schedules.common.kernel_info import KernelInfo


@dataclass(frozen=True)
class Attention:
    """Everything that the kernel depends on.

    Attributes:
        query, key, value: The operands, [batch, length, head, channel].
        bias: Broadcast to [batch, head, query, key]; added if fp32, and if bool false masks a key out.
        scale: Factor of the scores.
        diagonal: Query i sees keys up to i + diagonal; None if it sees all.
        result: For each of batch, length, head and channel, the dimension of the result.
        projected: Whether a projection of the values follows that usually comes before.
    """

    query: Folded
    key: Folded
    value: Folded
    bias: relax.Expr | None
    scale: float
    diagonal: Any
    result: tuple[int, ...] = (0, 1, 2, 3)
    projected: bool = False

    @property
    def keys(self) -> Any:
        """Number of keys; a variable, of which the kernel's parameters have their symbolic extents, if not known."""
        return self.key.shape[1]

    @property
    def operands(self) -> tuple[Folded, Folded, Folded]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def inputs(self) -> tuple[relax.Expr, ...]:
        """The tensors that are read from memory, in the order of `arguments`."""
        bias = [] if self.bias is None else [self.bias]
        return (*(value for operand in self.operands for value in operand.inputs), *bias)

    @property
    def arguments(self) -> list[Argument]:
        """The kernel's parameters, the result last."""
        arguments = [
            Argument(f"{name}{n}", self._extents(argument.shape), argument.dtype)
            for name, operand in zip(("query", "key", "value"), self.operands, strict=True)
            for n, argument in enumerate(operand.arguments)
        ]
        if self.bias is not None:
            arguments.append(Argument("bias", self._bias_shape, str(self.bias.ty.dtype)))
        batch, length, heads, _ = self.query.shape
        extents = (batch, length, heads, self.value.shape[3])
        return [*arguments, Argument("result", tuple(extents[self.result.index(d)] for d in range(4)))]

    def split(self, buffers: Sequence[tirx.Buffer]) -> tuple[list[Sequence[tirx.Buffer]], Sequence[tirx.Buffer]]:
        """The buffers of the inputs: those of query, key and value, and that of the bias if there is one."""
        sources = []
        for operand in self.operands:
            sources.append(buffers[: len(operand.inputs)])
            buffers = buffers[len(operand.inputs) :]
        return sources, buffers

    def place(self, b: Any, query: Any, h: Any, channel: Any) -> list[Any]:
        """Where in the result an element lies."""
        index = (b, query, h, channel)
        return [index[self.result.index(d)] for d in range(4)]

    def masked(self, bias: Sequence[tirx.Buffer], at: tuple[Any, Any, Any, Any], score: Any) -> Any:
        """The score of (batch, head, query, key) with bias or masks; -inf where the key is masked out."""
        if self.bias is not None:
            index = [
                0 if extent == 1 else i
                for extent, i in zip(self._bias_shape, at[4 - len(self._bias_shape) :], strict=True)
            ]
            stored = bias[0][tuple(index)]
            masks = str(self.bias.ty.dtype) == "bool"
            score = T.Select(stored, score, fp32(-math.inf)) if masks else score + stored
        if self.diagonal is not None:
            score = T.Select(at[3] <= at[2] + self.diagonal, score, fp32(-math.inf))
        return score

    @property
    def masks(self) -> bool:
        """Whether scores can be -inf."""
        return self.bias is not None or self.diagonal is not None

    def info(self, algorithm: str) -> KernelInfo:
        """The facts of a kernel that computes it in this way."""
        batch, queries, heads, channels = self.query.shape
        info = kernel_info.attention(
            algorithm,
            [operand.operations > 0 for operand in self.operands],
            self.value.shape[3],
            batch=batch,
            heads=heads,
            queries=queries,
            keys=self.keys if isinstance(self.keys, int) else str(self.keys),
            channels=channels,
        )
        return replace(info, decisions={"values": "projected afterwards"}) if self.projected else info

    @property
    def _bias_shape(self) -> tuple[Any, ...]:
        return () if self.bias is None else self._extents(extents(self.bias) or ())

    def _extents(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """A shape whose symbolic extents, which are all the same, are the kernel's own variable."""
        return tuple(extent if isinstance(extent, int) else self.keys for extent in shape)
