"""Traces the lowering of each Relax operator through a pipeline, to the compiled functions that compute it.

The pipeline runs unchanged, on a module whose bindings are tagged (`origins`). The operators of each call are then an
attribute of `main`, and the facts of each function are an attribute of it (`kernel_info`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import tvm
from tvm import ir, relax

from harness.compiler.schedules.common.kernel_info import UNSCHEDULED, KernelInfo, Kind, describe, infos_of
from harness.compiler.schedules.common.origins import Part, Role, Site, bindings_of, callee, sites_of, tagged


class LoweringKind(StrEnum):
    """The way in which an operator is lowered."""

    KERNEL = "kernel"
    FOLDED = "folded"
    LEGALIZATION = "legalization"
    DEFAULT = "default"
    UNSCHEDULED = "unscheduled"
    VIEW = "view"
    NOTHING = "nothing"


MEANINGS = {
    LoweringKind.KERNEL: "a kernel of this project",
    LoweringKind.FOLDED: "done by the kernel of a neighbour while it reads or writes",
    LoweringKind.LEGALIZATION: "loops of this project, fused and scheduled",
    LoweringKind.DEFAULT: "loops from TVM's legalization or the import, fused and scheduled",
    LoweringKind.UNSCHEDULED: "TVM's default, loops as they come",
    LoweringKind.VIEW: "the same memory in another shape",
    LoweringKind.NOTHING: "nothing is left of it",
}


@dataclass(frozen=True)
class Operator:
    """One call of the imported module, and its lowering.

    Attributes:
        name: The Relax operator, without `relax.`.
        inputs: Shapes of its tensor arguments, with the dtype where that is not fp32.
        output: Shape of its result.
        how: The kind of its lowering.
        functions: The compiled functions that compute it.
        detail: Their facts as a sentence: sizes and tiles of a kernel, schedules of loops.
        beside: The operators that the same functions compute, in order.
        at_load: Whether it runs once, when the model is loaded, not with every input.
        facts: The known facts of the functions.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    how: LoweringKind
    functions: tuple[str, ...] = ()
    detail: str = ""
    beside: tuple[str, ...] = ()
    at_load: bool = False
    facts: tuple[KernelInfo, ...] = ()


def trace(module: tvm.IRModule, pipeline: tvm.transform.Pass, target: tvm.target.Target) -> list[Operator]:
    """Lowers a module, and returns the lowering of each operator of `main`, in order.

    Args:
        module: The imported module, which is not changed.
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
    """Joins operators, the calls that compute them, and the facts of the called functions."""

    def __init__(self, calls: Mapping[int, ir.Call], lowered: tvm.IRModule) -> None:
        self.calls = calls
        self.infos = infos_of(lowered)
        self.called = _callees(lowered)
        computing: dict[int, list[tuple[Site, Part]]] = {}
        folding: dict[int, list[tuple[Site, Part]]] = {}
        for site in sites_of(lowered):
            for part in site.parts:
                for place, n in enumerate(part.operators):
                    (folding if place else computing).setdefault(n, []).append((site, part))
        self.computed = computing.keys()
        self.places = {n: _computing(places) for n, places in (folding | computing).items()}
        self.beside: dict[Site, list[int]] = {}
        for n in sorted(self.places):
            for site in dict.fromkeys(site for site, _ in self.places[n]):
                self.beside.setdefault(site, []).append(n)

    def operators(self) -> list[Operator]:
        """Returns every operator of the imported module, in order."""
        return [self._operator(n, call) for n, call in self.calls.items()]

    def _operator(self, n: int, call: ir.Call) -> Operator:
        sites = tuple(dict.fromkeys(site for site, _ in self.places.get(n, [])))
        functions = tuple(dict.fromkeys(site.function for site in sites))
        how = self._how(n, functions)
        facts = () if how is LoweringKind.VIEW else tuple(self.infos[name] for name in functions if name in self.infos)
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

    def _how(self, n: int, functions: Iterable[str]) -> LoweringKind:
        if n not in self.computed:
            return LoweringKind.FOLDED if n in self.places else LoweringKind.NOTHING
        roles = {part.role for _, part in self.places[n]}
        if Role.KERNEL in roles:
            return LoweringKind.KERNEL
        if not any(name in self.called for name in functions):
            return LoweringKind.VIEW
        infos = [self.infos.get(name) for name in functions]
        if any(info is None or UNSCHEDULED in info.schedules for info in infos):
            return LoweringKind.UNSCHEDULED
        if any(info is not None and info.kind is Kind.KERNEL for info in infos):
            return LoweringKind.KERNEL if Role.SUM in roles else LoweringKind.FOLDED
        return LoweringKind.LEGALIZATION if Role.LEGALIZATION in roles else LoweringKind.DEFAULT


def _computing(places: list[tuple[Site, Part]]) -> list[tuple[Site, Part]]:
    """Returns the sites that compute an operator: those of kernels if there are any."""
    kernels = [place for place in places if place[1].role is Role.KERNEL]
    return kernels or [place for place in places if place[1].role is not Role.HELPER] or places


def _callees(module: tvm.IRModule) -> set[str]:
    """Returns the names of everything that the Relax functions of a lowered module call."""
    callees: set[str] = set()

    def visit(part: relax.Expr) -> None:
        if isinstance(part, ir.Call):
            callees.add(callee(part))

    for function in module.functions.values():
        if isinstance(function, relax.Function):
            relax.analysis.post_order_visit(function, visit)
    return callees


def _name(call: ir.Call) -> str:
    """Returns the operation's name in the import."""
    operator = str(getattr(call.op, "name", "")).removeprefix("relax.")
    return f"{operator} {callee(call)}" if operator.startswith("call_") else operator or callee(call)


def _tensors(parts: Iterable[relax.Expr]) -> Iterator[relax.Expr]:
    for part in parts:
        if isinstance(part, relax.Tuple):
            yield from _tensors(part.fields)
        elif isinstance(getattr(part, "ty", None), relax.TensorType | relax.TupleType):
            yield part


def _shape(ty: ir.Type) -> str:
    """Writes extents and dtype as one word; fp32 is left out."""
    if isinstance(ty, relax.TupleType):
        return ", ".join(_shape(item) for item in ty.fields)
    if not isinstance(ty, relax.TensorType):
        return str(ty)
    extents = "x".join(str(getattr(extent, "value", extent)) for extent in ty.shape or ()) or "scalar"
    return extents if str(ty.dtype) == "float32" else f"{extents} {ty.dtype}"
