"""The lowering of each Relax operator by a pipeline, and the compiled functions that compute it.

The pipeline runs as it always does, on a module whose bindings are tagged (`origins`). The operators of
each call are then an attribute of `main`, and the facts of each function are an attribute of it (`kernel_info`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import tvm
from tvm import ir, relax

from harness.compiler.schedules.common.kernel_info import UNSCHEDULED, KernelInfo, Kind, describe, infos_of
from harness.compiler.schedules.common.origins import Part, Role, Site, bindings_of, callee, sites_of, tagged


class How(StrEnum):
    """How an operator is lowered."""

    KERNEL = "kernel"
    FOLDED = "folded"
    LEGALIZATION = "legalization"
    DEFAULT = "default"
    UNSCHEDULED = "unscheduled"
    VIEW = "view"
    NOTHING = "nothing"


MEANINGS = {
    How.KERNEL: "a kernel of this project",
    How.FOLDED: "done by the kernel of a neighbour while it reads or writes",
    How.LEGALIZATION: "loops of this project, fused and scheduled",
    How.DEFAULT: "loops from TVM's legalization or the import, fused and scheduled",
    How.UNSCHEDULED: "TVM's default, loops as they come",
    How.VIEW: "the same memory in another shape",
    How.NOTHING: "nothing is left of it",
}


@dataclass(frozen=True)
class Operator:
    """One call of the imported module and what became of it.

    Attributes:
        name: The Relax operator, without `relax.`.
        inputs: Shapes of its tensor arguments, with the dtype where that is not fp32.
        output: Shape of its result.
        how: How it was lowered.
        functions: The compiled functions that compute it.
        detail: Their facts as a sentence: sizes and tiles of a kernel, schedules of loops.
        beside: The operators that the same functions compute, in order.
        at_load: Whether it runs once, when the model is loaded, and not with every input.
        facts: The facts of the functions, as far as they have any.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    how: How
    functions: tuple[str, ...] = ()
    detail: str = ""
    beside: tuple[str, ...] = ()
    at_load: bool = False
    facts: tuple[KernelInfo, ...] = ()


def trace(module: tvm.IRModule, pipeline: tvm.transform.Pass, target: tvm.target.Target) -> list[Operator]:
    """Lowers a module, and returns for each operator of `main` what became of it, in order.

    Args:
        module: As imported; it is not changed.
        pipeline: Pipeline of a target.
        target: The target of that pipeline.

    Raises:
        RuntimeError: The pipeline loses track of the operators.
    """
    source = tagged(module)
    with target, tvm.transform.PassContext(opt_level=3):
        lowered = pipeline(source)
    calls = {n: b.value for n, b in enumerate(bindings_of(source["main"])) if isinstance(b.value, ir.Call)}
    return _Tracer(calls, lowered).operators()


class _Tracer:
    """Joins operators, the calls that compute them, and the facts of the functions that are called."""

    def __init__(self, calls: Mapping[int, ir.Call], lowered: tvm.IRModule) -> None:
        self.calls = calls
        self.infos = infos_of(lowered)
        self.called = _callees(lowered)
        own: dict[int, list[tuple[Site, Part]]] = {}
        folded: dict[int, list[tuple[Site, Part]]] = {}
        for site in sites_of(lowered):
            for part in site.parts:
                for n in part.operators[:1]:
                    own.setdefault(n, []).append((site, part))
                for n in part.operators[1:]:
                    folded.setdefault(n, []).append((site, part))
        self.own = {n: _computing(places) for n, places in own.items()}
        self.folded = {n: _computing(places) for n, places in folded.items() if n not in own}
        self.beside: dict[Site, list[int]] = {}
        for n in sorted(self.own | self.folded):
            for site in dict.fromkeys(site for site, _ in (self.own | self.folded)[n]):
                self.beside.setdefault(site, []).append(n)

    def operators(self) -> list[Operator]:
        """Returns every operator of the imported module, in order."""
        return [self._operator(n, call) for n, call in self.calls.items()]

    def _operator(self, n: int, call: ir.Call) -> Operator:
        places = self.own.get(n) or self.folded.get(n, [])
        sites = tuple(dict.fromkeys(site for site, _ in places))
        functions = tuple(dict.fromkeys(site.function for site in sites))
        how = self._how(n, functions)
        facts = () if how is How.VIEW else tuple(self.infos[name] for name in functions if name in self.infos)
        return Operator(
            name=_name(call),
            inputs=tuple(_shape(part.ty) for part in _tensors(call.args)),
            output=_shape(call.ty),
            how=how,
            functions=functions,
            detail="; ".join(filter(None, dict.fromkeys(map(describe, facts)))),
            beside=tuple(_name(self.calls[m]) for site in sites for m in self.beside[site] if m in self.calls),
            at_load=bool(sites) and all(site.at_load for site in sites),
            facts=facts,
        )

    def _how(self, n: int, functions: Iterable[str]) -> How:
        if n not in self.own:
            return How.FOLDED if n in self.folded else How.NOTHING
        roles = {part.role for _, part in self.own[n]}
        if Role.KERNEL in roles:
            return How.KERNEL
        if not any(name in self.called for name in functions):
            return How.VIEW
        infos = [self.infos.get(name) for name in functions]
        if any(info is None or UNSCHEDULED in info.schedules for info in infos):
            return How.UNSCHEDULED
        if any(info is not None and info.kind is Kind.KERNEL for info in infos):
            return How.KERNEL if Role.SUM in roles else How.FOLDED
        return How.LEGALIZATION if Role.LEGALIZATION in roles else How.DEFAULT


def _computing(places: list[tuple[Site, Part]]) -> list[tuple[Site, Part]]:
    """Returns the sites that compute an operator: those of kernels if there are any."""
    kernels = [place for place in places if place[1].role is Role.KERNEL]
    return kernels or [place for place in places if place[1].role is not Role.HELPER] or places


def _callees(module: tvm.IRModule) -> set[str]:
    """Returns what the Relax functions of a lowered module call."""
    found: set[str] = set()

    def visit(part: Any) -> None:
        if isinstance(part, ir.Call):
            found.add(callee(part))

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return found


def _name(call: ir.Call) -> str:
    """Returns the operation's name in the import."""
    operator = str(getattr(call.op, "name", "")).removeprefix("relax.")
    return f"{operator} {callee(call)}" if operator.startswith("call_") else operator or callee(call)


def _tensors(parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, relax.Tuple):
            yield from _tensors(part.fields)
        elif isinstance(getattr(part, "ty", None), relax.TensorType | relax.TupleType):
            yield part


def _shape(ty: Any) -> str:
    """Writes extents and dtype as one word; fp32 is left out."""
    if isinstance(ty, relax.TupleType):
        return ", ".join(_shape(item) for item in ty.fields)
    if not isinstance(ty, relax.TensorType):
        return str(ty)
    extents = "x".join(str(getattr(extent, "value", extent)) for extent in ty.shape or ()) or "scalar"
    return extents if str(ty.dtype) == "float32" else f"{extents} {ty.dtype}"
