"""Describes an attention for its kernels: operands, bias and masks of the scores, and the layout of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common import kernel_info
from harness.compiler.schedules.common.folding import Folded
from harness.compiler.schedules.common.graph import extents
from harness.compiler.schedules.common.kernel import Argument, fp32, free_variables
from harness.compiler.schedules.common.kernel_info import KernelInfo
from harness.compiler.schedules.cpu.bf16 import BF16, to_bf16
from harness.compiler.schedules.cpu.bias_of_image import AxialBias
from harness.compiler.schedules.cpu.blocking import packed_shape
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Read, pack_function
from harness.compiler.schedules.cpu.tile import Tile


@dataclass(frozen=True)
class Layer:
    """A linear layer whose result is an input of the key, and which the kernel computes while it packs keys.

    Attributes:
        source: The layer's input, one row for each key: [batch, key, head, narrow].
        weight: [narrow, wide], or transposed; the kernel gets it packed for the tile.
        transposed: Whether the weight is [wide, narrow].
        tile: The register tile, keys × wide channels.
        bias: One number for each of the wide channels, broadcast to the result; None if there is none.
        place: The number of the layer's result among the inputs of the key.
    """

    source: Folded
    weight: relax.Expr
    transposed: bool
    tile: Tile
    bias: relax.Expr | None
    place: int

    @property
    def narrow(self) -> int:
        """Returns the number of the source's channels."""
        return int(self.source.shape[3])

    @property
    def wide(self) -> int:
        """Returns the number of the result's channels."""
        return int(self.weight.ty.shape[0 if self.transposed else 1])

    @property
    def inputs(self) -> tuple[relax.Expr, ...]:
        """Returns the tensors that are read from memory, in the order of `arguments`."""
        return (*self.source.inputs, self.weight, *(() if self.bias is None else (self.bias,)))

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's parameters for the inputs."""
        weight = Argument("weight", packed_shape("right", 1, self.wide, self.narrow, self.tile))
        return [
            *self.source.arguments,
            weight,
            *([] if self.bias is None else [Argument("bias", extents(self.bias) or ())]),
        ]

    @property
    def packing(self) -> T.PrimFunc:
        """Returns the function that packs the weight."""

        def read(buffer: T.Buffer) -> Read:
            return lambda _, column, k: buffer[column, k] if self.transposed else buffer[k, column]

        source = Argument("source", extents(self.weight) or ())
        return pack_function("right", source, 1, self.wide, self.narrow, self.tile, read)


@dataclass(frozen=True)
class Attention:
    """The problem of an attention kernel, with its operands.

    Attributes:
        query, key, value: The operands, [batch, length, head, channel].
        bias: The bias, broadcast to [batch, head, query, key]; fp32 is added, and false in a bool masks a key out.
        scale: Factor of the scores.
        diagonal: Query i sees keys up to i + diagonal; None if it sees all.
        result: For each of batch, length, head and channel, the dimension of the result.
        projected: Whether a projection of the values follows that usually comes before.
        layer: The layer that the kernel computes keys with; None if they are read.
        arithmetic: Micro-kernel of both products.
        stores: Type of the result.
        axial_bias: The bias in parts, for a kernel that adds them up; there is no `bias` then.
    """

    query: Folded
    key: Folded
    value: Folded
    bias: relax.Expr | None
    scale: float
    diagonal: Any
    result: tuple[int, ...] = (0, 1, 2, 3)
    projected: bool = False
    layer: Layer | None = None
    arithmetic: MicroKernel = FP32
    stores: str = "float32"
    axial_bias: AxialBias | None = None

    @property
    def name(self) -> str:
        """Returns the kernel's name."""
        rounded = "astype" if self.stores == BF16 else ""
        return "_".join(filter(None, ("attention", self.arithmetic.name, rounded)))

    @property
    def depth(self) -> int:
        """Returns the number of elements of a query, or of a key, that are multiplied."""
        return int(self.query.shape[3]) // self.arithmetic.terms

    @property
    def keys(self) -> Any:
        """Returns the number of keys; an expression of the kernel's symbolic extents if it is symbolic."""
        return self.key.shape[1]

    @property
    def operands(self) -> tuple[Folded, Folded, Folded]:
        """Returns query, key and value."""
        return self.query, self.key, self.value

    @property
    def inputs(self) -> tuple[relax.Expr, ...]:
        """Returns the tensors that are read from memory, in the order of `arguments`."""
        bias = [self.bias] if self.bias is not None else [] if self.axial_bias is None else self.axial_bias.inputs
        return (*(value for part in self._parts for value in part[0]), *bias)

    @property
    def arguments(self) -> list[Argument]:
        """Returns the kernel's tensors, the result last."""
        arguments = [
            Argument(f"{name}{n}", argument.shape, argument.dtype)
            for name, part in zip(("query", "key", "value", "layer"), self._parts, strict=False)
            for n, argument in enumerate(part[1])
        ]
        if self.bias is not None:
            arguments.append(Argument("bias", self._bias_shape, str(self.bias.ty.dtype)))
        if self.axial_bias is not None:
            arguments += self.axial_bias.arguments
        batch, length, heads, _ = self.query.shape
        extents = (batch, length, heads, self.value.shape[3])
        shape = tuple(extents[self.result.index(d)] for d in range(4))
        return [*arguments, Argument("result", shape, self.stores)]

    @property
    def variables(self) -> list[T.Var]:
        """Returns the variables that a call passes after the inputs."""
        return free_variables(self.arguments)

    def split(self, buffers: Sequence[T.Buffer]) -> tuple[list[Sequence[T.Buffer]], Sequence[T.Buffer]]:
        """Splits the buffers of the inputs into those of query, key, value and layer, and those of the bias."""
        sources = []
        for inputs, _ in self._parts:
            sources.append(buffers[: len(inputs)])
            buffers = buffers[len(inputs) :]
        return sources, buffers

    @property
    def _parts(self) -> list[tuple[tuple[relax.Expr, ...], list[Argument]]]:
        """Returns inputs and arguments of query, key, value and layer, without the layer's result."""
        parts = [(operand.inputs, operand.arguments) for operand in self.operands]
        if self.layer is None:
            return parts
        query, (inputs, arguments), value = parts
        place = self.layer.place
        key = ((*inputs[:place], *inputs[place + 1 :]), [*arguments[:place], *arguments[place + 1 :]])
        return [query, key, value, (self.layer.inputs, self.layer.arguments)]

    def place(self, b: Any, query: Any, h: Any, channel: Any) -> list[Any]:
        """Returns the index in the result of an element."""
        index = (b, query, h, channel)
        return [index[self.result.index(d)] for d in range(4)]

    def store(self, result: T.Buffer, value: Any, index: tuple[Any, Any, Any, Any]) -> None:
        """Emits that an element, (batch, query, head, channel), gets to the result."""
        T.buffer_store(result, to_bf16(value) if self.stores == BF16 else value, self.place(*index))

    def masked(self, bias: Sequence[T.Buffer], position: tuple[Any, Any, Any, Any], score: Any) -> Any:
        """Returns the score of (batch, head, query, key) with bias or masks; -inf for a masked key."""
        if self.bias is not None:
            index = [
                0 if extent == 1 else i
                for extent, i in zip(self._bias_shape, position[4 - len(self._bias_shape) :], strict=True)
            ]
            stored = bias[0][tuple(index)]
            masks = str(self.bias.ty.dtype) == "bool"
            score = T.Select(stored, score, fp32(-math.inf)) if masks else score + stored
        if self.diagonal is not None:
            score = T.Select(position[3] <= position[2] + self.diagonal, score, fp32(-math.inf))
        return score

    @property
    def masks(self) -> bool:
        """Returns whether scores can be -inf."""
        return self.bias is not None or self.axial_bias is not None or self.diagonal is not None

    def info(self, algorithm: str) -> KernelInfo:
        """Returns the facts of a kernel with this algorithm."""
        batch, queries, heads, channels = self.query.shape
        info = kernel_info.attention(
            algorithm,
            [operand.operations > 0 for operand in self.operands],
            self.value.shape[3],
            batch=batch,
            heads=heads,
            queries=queries,
            keys=self.keys,
            channels=channels,
        )
        decisions = {"values": "projected afterwards"} if self.projected else {}
        if self.axial_bias is not None:
            decisions["bias"] = "added up from the lines and columns of an image"
        if self.layer is not None:
            decisions["keys"] = "projected while they are packed"
            if info.flop is not None:
                layer = 2 * math.prod(self.layer.source.shape) * channels
                info = replace(info, flop=info.flop + layer)
        return replace(info, decisions=decisions) if decisions else info

    @property
    def _bias_shape(self) -> tuple[Any, ...]:
        return () if self.bias is None else extents(self.bias) or ()
