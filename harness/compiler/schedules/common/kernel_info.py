"""Defines the facts of a compiled function, stored in one attribute: operator, algorithm, sizes, operations, bytes.

The module that emits a kernel, or the pass that schedules loops, attaches them to the function. They depend on nothing
but the function's own loops, because calls that compute the same share one function: which operators of a model it
computes, and whether it runs when the model is loaded, are facts of the calls (see `origins`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import tvm

from harness.compiler import tir as T

ATTRIBUTE = "kernel_info"
"""The attribute of a function that holds its facts as JSON."""

UNSCHEDULED = "unscheduled"
"""Stands for a schedule's name if a block keeps its original loops."""

FEED_FORWARD = "feed-forward"
"""Two linear layers in one kernel."""

PRODUCT = "product"
FILTERING, DEPTHWISE = "minimal filtering", "depthwise"
ATTENTION, FEW_QUERIES, TENSOR_CORES = "attention", "attention of few queries", "attention on tensor cores"
"""Algorithms whose sizes are told in the words of their field: products, convolutions and attention."""


class Kind(StrEnum):
    """The kind of a function: the author of its loops."""

    KERNEL = "kernel"
    """This project wrote its loops."""
    HELPER = "helper"
    """This project wrote its loops, which bring an operand of a kernel into the layout that the kernel reads."""
    LEGALIZATION = "legalization"
    """This project says what an element is; the loops are fused and scheduled like any others."""
    LOOPS = "loops"
    """The loops are TVM's, or fused from several legalizations, and scheduled."""


@dataclass(frozen=True)
class LostSchedule:
    """A schedule that was chosen and could not be applied, or loops that no schedule takes.

    Attributes:
        schedule: Name of the schedule.
        reason: Why it could not be applied, in one line.
        block: The block of the function, if it is one.
    """

    schedule: str
    reason: str
    block: str = ""

    def __str__(self) -> str:
        of_block = f" of block {self.block}" if self.block else ""
        return f"schedule {self.schedule}{of_block} was lost: {self.reason}"


@dataclass(frozen=True)
class KernelInfo:
    """The facts of one compiled function.

    Attributes:
        kind: The author of its loops.
        operator: The Relax operator that it computes, without `relax.`; empty for loops of several.
        algorithm: Its algorithm, if there are several.
        extents: Its sizes, by name; a word where one is symbolic.
        dtype: Element type of its result.
        tile: Sizes of the tile of a task, of a block of threads or of the registers, by name.
        decisions: Other decisions of its schedule, by name.
        reads: Names of the operands that it computes while it reads.
        writes: Relax operators, without `relax.`, that it applies to a result before it stores it.
        flop: Arithmetic operations of products, convolutions and attention, counted as `torch.utils.flop_counter` does:
            a convolution by minimal filtering as a direct one, attention as its two products; None for anything else.
        bytes_moved: Bytes of all its arguments, each counted once; None if unknown.
        schedules: Names of the schedules of its blocks, in order; `UNSCHEDULED` for a block without one.
        lost: Schedules that could not be applied.
    """

    kind: Kind
    operator: str = ""
    algorithm: str = ""
    extents: Mapping[str, int | str] = field(default_factory=dict)
    dtype: str = ""
    tile: Mapping[str, int] = field(default_factory=dict)
    decisions: Mapping[str, int | str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    flop: int | None = None
    bytes_moved: int | None = None
    schedules: tuple[str, ...] = ()
    lost: tuple[LostSchedule, ...] = ()

    def to_json(self) -> str:
        """Returns the value of the attribute; unknown facts are left out."""
        fields = {name: value for name, value in asdict(self).items() if value not in (None, "", {}, ())}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> KernelInfo:
        """Reads the facts that `to_json` wrote."""
        fields = json.loads(text)
        fields["kind"] = Kind(fields["kind"])
        for name in ("reads", "writes", "schedules"):
            fields[name] = tuple(fields.get(name, ()))
        fields["lost"] = tuple(LostSchedule(**lost) for lost in fields.get("lost", ()))
        return cls(**fields)

    @property
    def attributes(self) -> dict[str, str]:
        """Returns the attributes of a function that is being built."""
        return {ATTRIBUTE: self.to_json()}


def kernel(operator: str, algorithm: str = "", **extents: int | str) -> KernelInfo:
    """Returns the facts of a kernel: its operator, its algorithm, and its sizes by name."""
    return KernelInfo(Kind.KERNEL, operator, algorithm, extents)


def info_of(function: T.PrimFunc) -> KernelInfo | None:
    """Returns the facts of a function; None if it has none."""
    attributes = function.attrs or {}
    return KernelInfo.from_json(str(attributes[ATTRIBUTE])) if ATTRIBUTE in attributes else None


def with_info(function: T.PrimFunc, info: KernelInfo) -> T.PrimFunc:
    """Returns the function with these facts in place of others."""
    return function.with_attr(ATTRIBUTE, info.to_json())


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def infos_of(module: tvm.IRModule) -> dict[str, KernelInfo]:
    """Returns the facts of a module's compiled functions by name."""
    infos = {
        variable.name_hint: info_of(function)
        for variable, function in module.functions_items()
        if isinstance(function, T.PrimFunc)
    }
    return {name: info for name, info in infos.items() if info is not None}


def lost_schedules(module: tvm.IRModule) -> tuple[str, ...]:
    """Returns a sentence on each schedule that could not be applied to a function of a module."""
    return tuple(f"{name}: {lost}" for name, info in sorted(infos_of(module).items()) for lost in info.lost)


def size_of(info: KernelInfo) -> str:
    """Returns the sizes of a function in words; empty where it has none."""
    words = _SIZES.get(info.algorithm, _named)
    return words(info.extents) if info.extents else ""


def describe(info: KernelInfo) -> str:
    """Returns the facts of a function as a sentence for people; programs read the facts themselves."""
    parts = [size_of(info), info.algorithm if info.algorithm not in (PRODUCT, ATTENTION) else "", *_decided(info)]
    if info.reads:
        parts.append(f"{' and '.join(info.reads)} computed while they are read")
    if info.schedules:
        parts.append(", ".join(dict.fromkeys(info.schedules)))
    parts += [f"unscheduled: {lost}" for lost in info.lost]
    return ", ".join(filter(None, parts))


def _decided(info: KernelInfo) -> list[str]:
    """Returns the tile and the other decisions in words."""
    tile = info.tile
    other_sizes = {name: extent for name, extent in tile.items() if name not in ("rows", "columns")}
    words = [f"tile {tile['rows']}x{tile['columns']}"] if {"rows", "columns"} <= tile.keys() else []
    return [*words, *(f"{name} {value}" for name, value in (other_sizes | dict(info.decisions)).items())]


def _product(extents: Mapping[str, int]) -> str:
    batch = f"{extents['batch']} times " if extents["batch"] > 1 else ""
    return f"{batch}{extents['rows']}x{extents['depth']} · {extents['depth']}x{extents['columns']}"


def _convolution(extents: Mapping[str, int]) -> str:
    images = f"{extents['batch']} x " if extents["batch"] > 1 else ""
    kernel = f"{extents['kernel_height']}x{extents['kernel_width']}"
    filters = f"{extents['filters']}x{extents['channels']}x{kernel}"
    return f"{images}{filters} on {extents['height']}x{extents['width']}"


def _attention(extents: Mapping[str, int]) -> str:
    heads = f"{extents['batch']} x {extents['heads']} heads"
    width = f" to {extents['width']}" if extents["width"] != extents["channels"] else ""
    return f"{heads}, {extents['queries']} queries, {extents['keys']} keys, {extents['channels']} channels{width}"


def _named(extents: Mapping[str, int]) -> str:
    return ", ".join(f"{extent} {name}" for name, extent in extents.items())


_SIZES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    PRODUCT: _product,
    FILTERING: _convolution,
    DEPTHWISE: _convolution,
    ATTENTION: _attention,
    FEW_QUERIES: _attention,
    TENSOR_CORES: _attention,
}
