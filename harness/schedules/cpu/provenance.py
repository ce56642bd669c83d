"""What became of each Relax operator on its way through the CPU pipeline, and in which compiled function it ended.

The pipeline runs as it always does, watched by a pass instrument. Beforehand every binding of `main` gets a name of its
own, which Relax's passes keep up to LegalizeOps. From there on calls are recognized by what they compute: two calls of
the same function on the same values are the same value, however they are grouped, lifted or renamed. So nothing is
guessed from the order of passes or from names that passes make up, with one exception: the kernels that `rewrite.py`
calls are taken in the order in which they are emitted, which is that of the last operators that they cover.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.schedules.common.kernel import OPAQUE
from harness.schedules.cpu.elementwise import UNSCHEDULED
from harness.schedules.cpu.rewrite import KERNELS

_TAG = "operator"
"""What the names of the tagged variables begin with."""
_PACK = "pack"
"""Name of the functions that pack an operand of a kernel."""


LOAD = "main_transform_params"
"""The function that LiftTransformParams makes of what depends on weights alone."""


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
    How.DEFAULT: "loops from TVM's legalization or the import, fused and scheduled by this project",
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
        detail: What those say of themselves: sizes and tiles of a kernel, schedules of loops.
        beside: The operators that the same functions compute, in order.
        at_load: Whether it runs once, when the model is loaded, and not with every input.
    """

    name: str
    inputs: tuple[str, ...]
    output: str
    how: How
    functions: tuple[str, ...] = ()
    detail: str = ""
    beside: tuple[str, ...] = ()
    at_load: bool = False


def trace(module: tvm.IRModule, pipeline: tvm.transform.Pass, target: tvm.target.Target) -> list[Operator]:
    """Lowers a module and tells of each operator of `main` what became of it, in order.

    Args:
        module: As imported; it is not changed.
        pipeline: From `cpu_pipeline`.
        target: The target of that pipeline.

    Raises:
        RuntimeError: The pipeline does not do what this module knows of it.
    """
    tagger = _Tagger(module)
    tagged = module.clone()
    tagged["main"] = tagger.visit_expr(module["main"])
    watch = _Watch()
    with target, tvm.transform.PassContext(opt_level=3, instruments=[watch]):
        pipeline(tagged)
    return _Tracer(watch).operators()


@mutator
class _Tagger(PyExprMutator):  # type: ignore[misc]
    """Gives every binding a name of its own."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.count = 0

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        value = self.visit_expr(binding.value)
        renamed = type(binding.var)(f"{_TAG}{self.count}", value.ty)
        self.count += 1
        self.builder_.emit_normalized(relax.VarBinding(renamed, value))
        self.set_var_remap(binding.var, renamed)


@tvm.ir.instrument.pass_instrument
class _Watch:
    """Keeps the module as each pass leaves it, the first time the pass runs."""

    def __init__(self) -> None:
        self.after: dict[str, tvm.IRModule] = {}

    def run_before_pass(self, _module: tvm.IRModule, _info: Any) -> None:
        pass

    def run_after_pass(self, module: tvm.IRModule, info: Any) -> None:
        self.after.setdefault(str(info.name), module)


@dataclass(frozen=True)
class _Place:
    """Where a value is computed.

    Attributes:
        function: Name of the compiled function.
        at_load: Whether that is called when the model is loaded, and not by `main`.
        site: Number of the call; identical kernels share one function.
    """

    function: str
    at_load: bool
    site: int


@dataclass
class _Values:
    """Numbers values by what they compute."""

    numbers: dict[Any, int] = field(default_factory=dict)
    tuples: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def of(self, *what: Any) -> int:
        """The number of the value that is described by this hashable data."""
        return self.numbers.setdefault(what, len(self.numbers))

    def tuple_of(self, items: Sequence[int]) -> int:
        """The number of a tuple of values."""
        number = self.of("tuple", *items)
        self.tuples[number] = tuple(items)
        return number


class _Walk:
    """One walk over the calls of a module, which looks into the groups that FuseOps made.

    Attributes:
        numbers: Of the value of every variable outside of groups.
        places: Of every value that is the result of a call.
    """

    def __init__(self, module: tvm.IRModule, values: _Values) -> None:
        self.numbers: dict[relax.Var, int] = {}
        self.places: dict[int, list[_Place]] = {}
        self._module = module
        self._values = values
        self._sites = itertools.count()
        main = module["main"]
        inputs = int(main.attrs["num_input"]) if main.attrs and "num_input" in main.attrs else len(main.params)
        weights: Sequence[int] = [values.of("weight", n) for n in range(len(main.params) - inputs)]
        if LOAD in {variable.name_hint for variable in module.get_global_vars()}:
            load = module[LOAD]
            given = values.tuple_of([values.of("weight", n) for n in range(len(load.params[0].ty.fields))])
            weights = values.tuples[self._body(load, [given], None, at_load=True)]
        arguments = [*(values.of("input", n) for n in range(inputs)), *weights]
        self._body(main, arguments, None, at_load=False)

    def _body(self, function: relax.Function, arguments: Sequence[int], group: _Place | None, *, at_load: bool) -> int:
        """The number of what a function returns for these arguments."""
        known = dict(zip(function.params, arguments, strict=True))
        for binding in _bindings(function):
            known[binding.var] = self._value(binding.value, known, group, at_load)
        if group is None:
            self.numbers.update(known)
        return self._value(function.body.body, known, group, at_load)

    def _value(self, value: Any, known: Mapping[relax.Var, int], group: _Place | None, at_load: bool) -> int:
        def number(part: Any) -> int:
            return self._value(part, known, group, at_load)

        values = self._values
        if isinstance(value, relax.Var):
            return known[value]
        if isinstance(value, relax.Tuple):
            return values.tuple_of([number(item) for item in value.fields])
        if isinstance(value, relax.TupleGetItem):
            whole = number(value.tuple_value)
            items = values.tuples.get(whole)
            return values.of("item", whole, value.index) if items is None else items[value.index]
        if isinstance(value, ir.GenericConst):
            digest = hashlib.sha256(value.value.numpy().tobytes()).hexdigest()
            return values.of("constant", str(value.ty), digest)
        if not isinstance(value, ir.Call):
            return values.of("expression", str(value))
        if isinstance(value.op, ir.GlobalVar):
            place = _Place(value.op.name_hint, at_load, next(self._sites))
            return self._body(self._module[value.op], [number(part) for part in value.args], place, at_load=at_load)
        name = _callee(value)
        arguments = [number(part) for part in value.args if not isinstance(part, ir.GlobalVar)]
        result = values.of("call", name, tuple(arguments), str(value.attrs), str(value.ty))
        self.places.setdefault(result, []).append(group or _Place(name, at_load, next(self._sites)))
        return result


class _Tracer:
    """Joins what the passes left."""

    def __init__(self, watch: Any) -> None:
        self.source = _values(watch.after["CanonicalizeBindings"]["main"])
        self.users = _users(self.source)
        self.called = _values(watch.after["CallKernels"]["main"])
        self.kept = {variable.name: variable for variable in self.called if variable.name.startswith(_TAG)}
        legalized = watch.after["LegalizeOps"]
        self.legalized = _functions(legalized)
        self.values = _values(legalized["main"])
        self.final = _functions(watch.after["ScheduleRemaining"])
        names = _Values()
        self.numbers = _Walk(legalized, names).numbers
        self.places = _Walk(watch.after["FuseOps"], names).places
        self.calls = _callees(watch.after["RewriteDataflowReshape"])
        self.kernels = self._kernels()

    def operators(self) -> list[Operator]:
        """Every operator of the imported module, in order."""
        placed = {variable: self._places(variable) for variable in self.source}
        folded = {
            variable: self._readers(variable, placed)
            for variable, places in placed.items()
            if not places and variable not in self.kernels
        }
        everywhere = placed | {variable: places for variable, places in folded.items() if places}
        beside: dict[int, list[str]] = {}
        for variable, places in everywhere.items():
            if isinstance(self.source[variable], ir.Call):
                for site in {place.site for place in places}:
                    beside.setdefault(site, []).append(_name(self.source[variable]))
        return [
            self._operator(variable, value, everywhere[variable], beside, variable in folded)
            for variable, value in self.source.items()
            if isinstance(value, ir.Call)
        ]

    def _operator(
        self,
        variable: relax.Var,
        call: ir.Call,
        places: Sequence[_Place],
        beside: Mapping[int, list[str]],
        folded: bool,
    ) -> Operator:
        functions = tuple(dict.fromkeys(place.function for place in places))
        details = dict.fromkeys(_explain(self.final.get(name)) for name in functions)
        how = self._how(variable, functions, folded)
        return Operator(
            name=_name(call),
            inputs=tuple(_shape(part.ty) for part in _tensors(call.args)),
            output=_shape(call.ty),
            how=how,
            functions=functions,
            detail="; ".join(filter(None, details)),
            beside=tuple(name for site in dict.fromkeys(place.site for place in places) for name in beside[site]),
            at_load=bool(places) and all(place.at_load for place in places),
        )

    def _how(self, variable: relax.Var, functions: Sequence[str], folded: bool) -> How:
        if not functions:
            return How.NOTHING
        if folded:
            return How.FOLDED
        if variable in self.kernels:
            return How.KERNEL if _name(self.source[variable]) in _KERNEL_OPERATORS else How.FOLDED
        legalized = [self.legalized.get(_callee(self.values[part])) for part in self._parts(variable)]
        if any(map(_is_kernel, legalized)):
            return How.KERNEL
        if not any(name in self.calls for name in functions):
            return How.VIEW
        explained = [_explain(self.final.get(name)) for name in functions]
        if any(not text or UNSCHEDULED in text for text in explained):
            return How.UNSCHEDULED
        return How.LEGALIZATION if any(map(_explain, legalized)) else How.DEFAULT

    def _places(self, variable: relax.Var) -> list[_Place]:
        """Where the operator is computed, by kernels if there are any; empty if that is nowhere by itself."""
        parts = self._parts(variable)
        kernels = [part for part in parts if _is_kernel(self.legalized.get(_callee(self.values[part])))]
        return [place for part in kernels or parts for place in self.places.get(self.numbers[part], [])]

    def _parts(self, variable: relax.Var) -> list[relax.Var]:
        """The calls that an operator became, as variables of the legalized module, the last one its result."""
        if variable in self.kernels:
            return [self.kernels[variable]]
        if variable.name not in self.kept:
            return []
        parts: list[relax.Var] = []
        waiting = [self.kept[variable.name]]
        while waiting:
            part = waiting.pop()
            value = self.values.get(part)
            if value is None or part in parts:
                continue
            if isinstance(value, ir.Call):
                parts.insert(0, part)
            # What legalization put before the result has neither a name of ours nor been there before.
            used = relax.analysis.free_vars(value)
            waiting += [v for v in used if v not in self.called and not v.name.startswith(_TAG)]
        return parts

    def _readers(self, variable: relax.Var, placed: Mapping[relax.Var, Sequence[_Place]]) -> list[_Place]:
        """Where the kernels are that do an operator while they read; empty if nobody needs it."""
        found: list[_Place] = []
        for user in dict.fromkeys(self.users.get(variable, [])):
            if user in self.kernels:
                found += placed[user]
            elif not placed[user]:
                found += self._readers(user, placed)
        return found

    def _kernels(self) -> dict[relax.Var, relax.Var]:
        """By operator that a kernel of `rewrite.py` covers: the variable that holds what the kernel computes.

        A kernel covers an operator of `KERNELS` and those that follow, each the only user of the one before it, as far
        as they are gone.
        """
        chains: list[list[relax.Var]] = []
        covered: set[relax.Var] = set()
        for variable, value in self.source.items():
            if variable.name in self.kept or _operator_name(value) not in KERNELS:
                continue
            chain = [variable]
            while (user := self._only_user(chain[-1])) is not None:
                if user.name in self.kept or user in covered or _operator_name(self.source[user]) in KERNELS:
                    break
                chain.append(user)
            chains.append(chain)
            covered.update(chain)
        order = {variable: n for n, variable in enumerate(self.source)}
        chains.sort(key=lambda chain: order[chain[-1]])
        calls = [
            variable
            for variable, value in self.called.items()
            if variable.name not in self.kept and isinstance(value, ir.Call) and not _callee(value).startswith(_PACK)
        ]
        expected, found = ([str(variable.ty) for variable in part] for part in ([c[-1] for c in chains], calls))
        if expected != found:
            raise RuntimeError(f"kernels were expected to give {expected}, but give {found}")
        return {variable: call for chain, call in zip(chains, calls, strict=True) for variable in chain}

    def _only_user(self, variable: relax.Var) -> relax.Var | None:
        users = self.users.get(variable, [])
        return users[0] if isinstance(variable, relax.DataflowVar) and len(users) == 1 else None


_KERNEL_OPERATORS = frozenset(name.removeprefix("relax.") for name in KERNELS)


def _bindings(function: relax.Function) -> Iterator[Any]:
    for block in function.body.blocks:
        yield from block.bindings


def _values(function: relax.Function) -> dict[relax.Var, Any]:
    return {binding.var: binding.value for binding in _bindings(function)}


def _users(values: Mapping[relax.Var, Any]) -> dict[relax.Var, list[relax.Var]]:
    """By variable: those whose values use it, as often as they do."""
    users: dict[relax.Var, list[relax.Var]] = {}
    for variable, value in values.items():
        relax.analysis.post_order_visit(
            value,
            lambda part, variable=variable: (
                users.setdefault(part, []).append(variable) if isinstance(part, relax.Var) else None
            ),
        )
    return users


def _callees(module: tvm.IRModule) -> set[str]:
    """Names of the functions that the Relax functions of a module call."""
    return {
        _callee(value)
        for _, function in module.functions_items()
        if isinstance(function, relax.Function)
        for value in _values(function).values()
        if isinstance(value, ir.Call)
    }


def _callee(call: Any) -> str:
    """The name of what is called: a function of the module or outside of it, or an operator."""
    target = call.args[0] if getattr(call.op, "name", "").startswith("relax.call_") and call.args else call.op
    if isinstance(target, ir.GlobalVar):
        return str(target.name_hint)
    return str(getattr(target, "global_symbol", None) or getattr(target, "name", target))


def _operator_name(value: Any) -> str:
    return str(getattr(value.op, "name", "")) if isinstance(value, ir.Call) else ""


def _name(call: ir.Call) -> str:
    """What the import calls the operation."""
    operator = _operator_name(call).removeprefix("relax.")
    return f"{operator} {_callee(call)}" if operator.startswith("call_") else operator or _callee(call)


def _functions(module: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    return {v.name_hint: f for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}


def _is_kernel(function: tirx.PrimFunc | None) -> bool:
    """Whether the function comes from `kernel.prim_func`."""
    if function is None:
        return False
    attributes = function.attrs or {}
    return bool(attributes.get("tirx.is_scheduled", False)) and int(attributes.get("op_pattern", -1)) == OPAQUE


def _explain(function: tirx.PrimFunc | None) -> str:
    return str((function.attrs or {}).get("explain", "")) if function is not None else ""


def _tensors(parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        if isinstance(part, relax.Tuple):
            yield from _tensors(part.fields)
        elif isinstance(getattr(part, "ty", None), relax.TensorType | relax.TupleType):
            yield part


def _shape(ty: Any) -> str:
    """Extents and dtype as one word; fp32 is left out."""
    if isinstance(ty, relax.TupleType):
        return ", ".join(_shape(item) for item in ty.fields)
    if not isinstance(ty, relax.TensorType):
        return str(ty)
    extents = "x".join(str(getattr(extent, "value", extent)) for extent in ty.shape or ()) or "scalar"
    return extents if str(ty.dtype) == "float32" else f"{extents} {ty.dtype}"
