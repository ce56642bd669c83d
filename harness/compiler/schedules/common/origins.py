"""Tracks the operators of an imported module that each call comes from, through the passes of a pipeline.

`tagged` writes the number of its operator into the name of every binding of `main`, and into the span of its call.
Passes on operators keep the names of rewritten bindings and the spans of unchanged calls; a pass of this project that
makes one call of several operators names it after all of them (`join_tags`). Where calls are legalized, `keep_origins`
writes the operators of each name into the spans of its calls, because from there on passes keep spans and rename
variables. Where calls are grouped, `fuse_calls` writes all of it into an attribute of `main`, in which `sites_of` finds
it when everything is lowered.

A module without tags is not changed, and the code of a tagged module stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import is_call
from harness.compiler.schedules.common.kernel_info import info_of

LOAD = "main_transform_params"
"""The function of the computations that depend on weights alone, which LiftTransformParams makes."""

_TAG = "operator:"
"""The prefix of tags; the numbers of operators follow."""
_SITES = "sites"
"""The attribute of `main` that holds the sites."""
_MARK = "mark"
"""The attribute of a marked call."""
_SUM = 4
"""`relax::OpPatternKind::kOutEWiseFusable`: a product or convolution."""


class Role(StrEnum):
    """The role of one call, before it is fused with its neighbours."""

    KERNEL = "kernel"
    HELPER = "helper"
    LEGALIZATION = "legalization"
    SUM = "sum"
    """Loops of a product or convolution, which a rule may replace by a kernel."""
    LOOPS = "loops"


@dataclass(frozen=True)
class Part:
    """One call in a group of calls that are compiled to one function.

    Attributes:
        operators: Numbers of its operators: first the one that it computes, then those that it folds.
        role: Its role.
    """

    operators: tuple[int, ...]
    role: Role


@dataclass(frozen=True)
class Site:
    """One call of a compiled function.

    Attributes:
        function: Its name.
        at_load: Whether it is called when the model is loaded, not with every input.
        parts: The calls that it was fused from, in order.
    """

    function: str
    at_load: bool
    parts: tuple[Part, ...]


def tagged(module: tvm.IRModule) -> tvm.IRModule:
    """Canonicalizes the bindings of a module, and tags those of `main` with their numbers, counted from 0."""
    module = relax.transform.CanonicalizeBindings()(module)
    numbers = {binding.var: n for n, binding in enumerate(bindings_of(module["main"]))}
    return _retagged(module, lambda binding: (numbers[binding.var],))


def join_tags(variables: Iterable[relax.Var]) -> str:
    """Returns the name for a call that computes the operator of the first variable and folds those of the others.

    A name that is no tag stays as it is.
    """
    first, *others = variables
    numbers = _numbers(first.name)
    if not numbers:
        return str(first.name)
    return _tag(dict.fromkeys([*numbers, *(n for variable in others for n in _numbers(variable.name))]))


@tvm.transform.module_pass(opt_level=0, name="KeepOrigins")
def keep_origins(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Writes the operators of every call of `main` into its span, after operators have become calls of functions.

    An untagged binding belongs to the next tagged one.
    """
    if not _is_tagged(module):
        return module
    numbers_by_variable: dict[relax.Var, tuple[int, ...]] = {}
    waiting: list[relax.Var] = []
    for binding in bindings_of(module["main"]):
        waiting.append(binding.var)
        if numbers := _numbers(binding.var.name):
            numbers_by_variable |= dict.fromkeys(waiting, numbers)
            waiting = []
    return _retagged(module, lambda binding: numbers_by_variable.get(binding.var, ()))


@tvm.transform.module_pass(opt_level=0, name="FuseCalls")
def fuse_calls(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Runs TVM's FuseOps; in a tagged module, an attribute of `main` then has the operators of each call.

    Equal groups are one function, whose calls cannot be distinguished. So calls are marked and fused once more: the
    groups are the same, call by call, and no two of them are equal.
    """
    fuse = relax.transform.FuseOps()
    fused = fuse(module)
    callers = [name for name in (LOAD, "main") if name in {variable.name_hint for variable in module.get_global_vars()}]
    if not any(_spanned(binding.value) for name in callers for binding in bindings_of(module[name])):
        return fused
    marker, marked = _Marker(module), module.clone()
    for name in callers:
        marked[name] = marker.visit_expr(module[name])
    fused_marked = fuse(marked)
    sites = [
        asdict(Site(callee(binding.value), name == LOAD, tuple(_parts(fused_marked, counterpart.value))))
        for name in callers
        for binding, counterpart in zip(bindings_of(fused[name]), bindings_of(fused_marked[name]), strict=True)
        if isinstance(binding.value, ir.Call)
    ]
    fused["main"] = fused["main"].with_attr(_SITES, json.dumps(sites))
    return fused


def merge_sites(module: tvm.IRModule, earlier: Mapping[str, Mapping[int, int]]) -> tvm.IRModule:
    """Adds the operators of dropped calls to the sites of the calls whose results replace theirs.

    Args:
        module: The result of `fuse_calls`, without the dropped calls; a module without tags is not changed.
        earlier: For each of `LOAD` and `main` in the module, the number of the call that each call became.
    """
    if "main" not in earlier or _SITES not in (module["main"].attrs or {}):
        return module
    sites, merged = sites_of(module), list[Site]()
    for name in (LOAD, "main"):
        parts: dict[int, tuple[Part, ...]] = {}
        function_sites = [site for site in sites if site.at_load == (name == LOAD)]
        for number, call in earlier.get(name, {}).items():
            parts[call] = function_sites[number].parts + parts.get(call, ())  # what a site returns stands last in it
        merged += [replace(function_sites[number], parts=parts[number]) for number in sorted(parts)]
    module["main"] = module["main"].with_attr(_SITES, json.dumps([asdict(site) for site in merged]))
    return module


def sites_of(lowered: tvm.IRModule) -> list[Site]:
    """Returns the sites of all calls of a tagged and lowered module, in order, those at load first.

    Raises:
        RuntimeError: The pipeline has not written them.
    """
    attributes = lowered["main"].attrs or {}
    if _SITES not in attributes:
        raise RuntimeError("the pipeline has lost track of the operators")
    return [
        Site(
            site["function"],
            site["at_load"],
            tuple(Part(tuple(part["operators"]), Role(part["role"])) for part in site["parts"]),
        )
        for site in json.loads(str(attributes[_SITES]))
    ]


def bindings_of(function: relax.Function) -> Iterator[relax.Binding]:
    """Yields the bindings of a function, in order."""
    for block in function.body.blocks:
        yield from block.bindings


def callee(call: ir.Call) -> str:
    """Returns the name of the function or operator that is called."""
    target = call.args[0] if getattr(call.op, "name", "").startswith("relax.call_") and call.args else call.op
    if isinstance(target, ir.GlobalVar):
        return str(target.name_hint)
    return str(getattr(target, "global_symbol", None) or getattr(target, "name", target))


def _tag(numbers: Iterable[int]) -> str:
    return _TAG + ",".join(map(str, numbers))


def _numbers(name: str) -> tuple[int, ...]:
    """Returns the operators that a tag names; none for other names."""
    return tuple(map(int, name.removeprefix(_TAG).split(","))) if name.startswith(_TAG) else ()


def _spanned(value: relax.Expr) -> tuple[int, ...]:
    span = getattr(value, "span", None)
    return _numbers(str(span.source_name.name)) if isinstance(span, ir.Span) else ()


def _is_tagged(module: tvm.IRModule) -> bool:
    if "main" not in {variable.name_hint for variable in module.get_global_vars()}:
        return False
    main = module["main"]
    return isinstance(main, relax.Function) and any(_numbers(b.var.name) for b in bindings_of(main))


def _retagged(module: tvm.IRModule, numbers: Callable[[relax.Binding], Sequence[int]]) -> tvm.IRModule:
    """Retags `main`; a binding without numbers keeps its name and loses its span."""
    result = module.clone()
    result["main"] = _Tagger(module, numbers).visit_expr(module["main"])
    return result


@mutator
class _Tagger(PyExprMutator):  # type: ignore[misc]
    """Tags bindings and calls."""

    def __init__(self, module: tvm.IRModule, numbers: Callable[[relax.Binding], Sequence[int]]) -> None:
        super().__init__(module)
        self.numbers = numbers

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        numbers = self.numbers(binding)
        value = self.visit_expr(binding.value)
        if numbers and isinstance(value, ir.Call):
            span = ir.Span(ir.SourceName(_tag(numbers)), 0, 0, 0, 0)
            value = ir.Call(value.op, value.args, value.attrs, value.ty_args, span, value.ty)
        variable = type(binding.var)(_tag(numbers) if numbers else binding.var.name, binding.var.ty)
        self.builder_.emit_normalized(relax.VarBinding(variable, value))
        self.set_var_remap(binding.var, variable)


@mutator
class _Marker(PyExprMutator):  # type: ignore[misc]
    """Makes every call of a function distinct."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.count = 0

    def visit_call_(self, op: ir.Call) -> relax.Expr:
        if not is_call(op, "relax.call_tir") or op.attrs is not None:
            return op
        self.count += 1
        return ir.Call(op.op, op.args, {_MARK: self.count}, op.ty_args, op.span, op.ty)


def _parts(module: tvm.IRModule, call: ir.Call) -> Iterator[Part]:
    """Yields the parts of a call: the calls of its group, or itself."""
    group = module[call.op] if isinstance(call.op, ir.GlobalVar) else None
    calls = [binding.value for binding in bindings_of(group)] if isinstance(group, relax.Function) else [call]
    yield from (Part(_spanned(part), _role(module, part)) for part in calls if isinstance(part, ir.Call))


def _role(module: tvm.IRModule, call: ir.Call) -> Role:
    target = call.args[0] if call.args and isinstance(call.args[0], ir.GlobalVar) else None
    function = None if target is None else module[target]
    if not isinstance(function, T.PrimFunc):
        return Role.LOOPS
    info = info_of(function)
    if info is not None:
        return Role(info.kind)
    return Role.SUM if int((function.attrs or {}).get("op_pattern", -1)) == _SUM else Role.LOOPS
