"""Finds the operators with a kernel, with the elementwise operations that follow, and calls the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.common.folding import BINARY, moved, row_starts
from harness.compiler.schedules.common.graph import (
    MOVES,
    Facts,
    between,
    facts_of,
    is_call,
    number,
    parameters_of,
    permutation,
    static_shape,
)
from harness.compiler.schedules.common.origins import join_tags
from harness.compiler.schedules.cpu.attention import key_layers, lower_attention
from harness.compiler.schedules.cpu.conv2d import lower_conv2d
from harness.compiler.schedules.cpu.conv2d_transpose import lower_conv2d_transpose
from harness.compiler.schedules.cpu.epilogue import UNARY, Epilogue, ResultLayout, Step
from harness.compiler.schedules.cpu.feed_forward import feed_forward, joins
from harness.compiler.schedules.cpu.gemm import lower_matmul, rounded_left
from harness.compiler.schedules.cpu.layer_norm_2d import lower_layer_norm_2d
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.microkernels.choice import micro_kernels
from harness.compiler.schedules.cpu.normalization import lower_rounded_layer_norm
from harness.compiler.schedules.cpu.schedule import Workload
from harness.compiler.schedules.cpu.tile import vector_unit
from harness.compiler.schedules.cpu.value_projection import movable

Lower = Callable[[Context, ir.Call], Lowering | None]

KERNELS: dict[str, Lower] = {
    "relax.matmul": lower_matmul,
    "relax.nn.conv2d": lower_conv2d,
    "relax.nn.conv2d_transpose": lower_conv2d_transpose,
    "relax.nn.attention": lower_attention,
    "relax.nn.attention_bias": lower_attention,
    "relax.divide": lower_layer_norm_2d,
}
"""Functions that lower a Relax operator, or several that end with it, to a kernel; by operator."""


def call_kernels(target: tvm.target.Target, schedules: Schedules = UNTUNED) -> tvm.transform.Pass:
    """Replaces products, convolutions and attention by calls of this package's kernels; leaves the rest alone."""

    @tvm.transform.module_pass(opt_level=0, name="CallKernels")
    def run(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        rewriter = _Rewriter(module)
        for variable, function in module.functions_items():
            if isinstance(function, relax.Function):
                rewriter.plan = _plan(*_context_of(function, module, target, schedules))
                rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
        return rewriter.builder_.get()

    return run


def workloads(module: tvm.IRModule, target: tvm.target.Target) -> list[Workload]:
    """Returns the tunable workloads of an imported module, call by call."""
    workloads_found: list[Workload] = []
    module = relax.transform.CanonicalizeBindings()(module)
    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            context, facts = _context_of(function, module, target, UNTUNED)
            _plan(context, facts)
            workloads_found += context.workloads
    return workloads_found


def _context_of(
    function: relax.Function, module: tvm.IRModule, target: tvm.target.Target, schedules: Schedules
) -> tuple[Context, Facts]:
    """Makes the context that lowerings ask about a function, and the facts of its variables."""
    facts = facts_of(function)
    context = Context(
        facts.bindings,
        parameters_of(function, facts.bindings),
        functions=dict(module.functions_items()),
        unit=vector_unit(target),
        kernels=micro_kernels(target),
        schedules=schedules,
    )
    context = replace(context, projected_afterwards=movable(context, facts))
    return replace(context, key_layers=key_layers(context, facts)), facts


@dataclass(frozen=True)
class _Fused:
    """A kernel to call in place of the last operator of a chain.

    Attributes:
        lowering: The lowering of the chain's first operator.
        operands: Operands of the epilogue.
        epilogue: The operators that follow the first.
        covers: The variables that the kernel computes: the first operator's, the epilogue's, and those folded into its
            reads.
    """

    lowering: Lowering
    operands: tuple[relax.Expr, ...]
    epilogue: Epilogue
    covers: tuple[relax.Var, ...]


@dataclass(frozen=True)
class _Plan:
    """The action at each binding: emit a kernel, or nothing because a later kernel covers it."""

    kernels: Mapping[relax.Var, _Fused]
    covered: frozenset[relax.Var]


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    """Executes a plan."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.plan = _Plan({}, frozenset())

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        fused = self.plan.kernels.get(binding.var)
        if fused is not None:
            inputs = [self.visit_expr(value) for value in (*fused.lowering.inputs, *fused.operands)]
            value = self.builder_.normalize(fused.lowering.build(self.builder_, inputs, fused.epilogue))
            variable = type(binding.var)(join_tags(fused.covers), value.ty)
            self.builder_.emit_normalized(relax.VarBinding(variable, value))
            self.set_var_remap(binding.var, variable)
        elif binding.var not in self.plan.covered:
            super().visit_var_binding_(binding)


def _plan(context: Context, facts: Facts) -> _Plan:
    kernels: dict[relax.Var, _Fused] = {}
    covered: set[relax.Var] = set(context.projected_afterwards)
    covered |= {variable for layer in context.key_layers.values() for variable in layer.bindings}
    for variable, value in context.bindings.items():
        if variable in covered or not isinstance(value, ir.Call) or getattr(value.op, "name", None) not in KERNELS:
            continue
        lowering = KERNELS[value.op.name](context, value)
        if lowering is None:
            continue
        last, covers = variable, [variable]
        user = _only_user(facts, last)
        context.results.add(variable)
        if (
            lowering.permuted is not None
            and user is not None
            and is_call(context.bindings[user], "relax.permute_dims")
            and not _read_as_rows(context, facts, variable)
        ):
            other = lowering.permuted(permutation(context.bindings[user]))
            if other is not None:
                covered.add(last)
                covers.append(user)
                lowering, last = other, user
        layout, steps, operands = lowering.layout, [], []
        while layout is not None and (following := _next_step(context, facts, layout, last)) is not None:
            if following[0] in kernels or following[0] in covered:
                break  # the sum of two products: the first one's write-back does it
            covered.add(last)
            last, step, operand = following
            covers.append(last)
            steps.append(step)
            operands += [] if operand is None else [operand]
            layout = step.moved(layout)
        shapes = tuple(static_shape(operand) or () for operand in operands)
        context.results.add(last)
        for argument in value.args:
            covers += between(context.bindings, argument, lowering.inputs)
        kernels[last] = _Fused(lowering, tuple(operands), Epilogue(tuple(steps), shapes), tuple(covers))
    _join_linear_layers(context, facts, kernels, covered)
    _store_rounded(context, facts, kernels)
    return _Plan(kernels, frozenset(covered))


def _join_linear_layers(
    context: Context, facts: Facts, kernels: dict[relax.Var, _Fused], covered: set[relax.Var]
) -> None:
    """Joins two linear layers in one kernel if the values between them are too large to store (`feed_forward`)."""
    for last, second in list(kernels.items()):
        hidden = second.lowering.inputs[0]
        first = kernels.get(hidden) if isinstance(hidden, relax.Var) else None
        if first is None or first.lowering.linear is None or second.lowering.linear is None:
            continue
        moves = [hidden]
        while (user := _only_user(facts, moves[-1])) is not None and not user.same_as(second.covers[0]):
            moves.append(user)
        if user is None or not joins(first.lowering.linear, first.epilogue, second.lowering.linear):
            continue
        lowering = feed_forward(first.lowering, first.epilogue, second.lowering, len(first.operands))
        operands = (*first.operands, *second.operands)
        kernels[last] = _Fused(lowering, operands, second.epilogue, (*first.covers, *second.covers))
        covered.update(moves)
        del kernels[hidden]


def _store_rounded(context: Context, facts: Facts, kernels: dict[relax.Var, _Fused]) -> None:
    """Makes kernels store bfloat16 for readers that round anyway: the same numbers in half the memory."""
    readers = {fused.covers[0]: fused.lowering.inputs[0] for fused in kernels.values() if fused.lowering.rounds}

    def rounded(variable: relax.Var) -> bool:
        return _all_round(context, facts, readers, variable, (variable,))

    for last, fused in list(kernels.items()):
        if fused.lowering.layout is not None and rounded(last):
            kernels[last] = replace(fused, epilogue=fused.epilogue.rounded())
        elif fused.lowering.rounded is not None and rounded(last):
            kernels[last] = replace(fused, lowering=fused.lowering.rounded())
    for variable, value in context.bindings.items():
        if is_call(value, "relax.nn.layer_norm") and rounded(variable):
            lowering = lower_rounded_layer_norm(value)
            if lowering is not None:
                kernels[variable] = _Fused(lowering, (), Epilogue(), (variable,))


def _all_round(
    context: Context,
    facts: Facts,
    readers: Mapping[relax.Var, relax.Expr],
    variable: relax.Var,
    same: tuple[relax.Var, ...],
) -> bool:
    """Returns whether every reader of a variable is a kernel that rounds it.

    Args:
        context: The function.
        facts: The bindings of the function and their users.
        readers: The values that kernels read first and round, by their first operator.
        variable: The result of a kernel, or a moved form of it.
        same: The result, and those on the way to the variable that are views of it.
    """

    def rounds(user: relax.Var | None) -> bool:
        if user is None:
            return False
        if user in readers:
            return any(readers[user].same_as(one) for one in same)
        value = context.bindings[user]
        if is_call(value, "relax.permute_dims"):  # a kernel may read through it; what is copied stays fp32
            return _all_round(context, facts, readers, user, same)
        views = (*same, user) if variable in same else same
        moves = is_call(value, "relax.broadcast_to") and static_shape(value) == static_shape(value.args[0])
        return (moves or is_call(value, "relax.reshape", "relax.astype")) and _all_round(
            context, facts, readers, user, views
        )

    users = facts.users.get(variable, [])
    return bool(users) and all(map(rounds, users))


def _only_user(facts: Facts, variable: relax.Var) -> relax.Var | None:
    """Returns the binding that is the only one to use a variable of the same dataflow block, which it uses once."""
    users = facts.users.get(variable, [])
    return users[0] if isinstance(variable, relax.DataflowVar) and len(users) == 1 else None


def _read_as_rows(context: Context, facts: Facts, variable: relax.Var) -> bool:
    """Returns whether only a matrix product reads the variable, and can read its rows where they lie."""
    last = variable
    while (user := _only_user(facts, last)) is not None and is_call(context.bindings[user], *MOVES):
        last = user
    if user is not None and is_call(context.bindings[user], "relax.astype"):
        user = _only_user(facts, user)
    if user is None or not is_call(context.bindings[user], "relax.matmul"):
        return False
    rounded = rounded_left(context, context.bindings[user])
    left = context.bindings[user].args[0] if rounded is None else rounded
    shape = static_shape(left)
    if not left.same_as(last) or shape is None:
        return False
    folded = moved(context, left)
    return folded.inputs[0].same_as(variable) and bool(row_starts(folded, math.prod(shape[:-1]), shape[-1]))


def _next_step(
    context: Context, facts: Facts, layout: ResultLayout, last: relax.Var
) -> tuple[relax.Var, Step, relax.Expr | None] | None:
    """Returns the elementwise operation that is the only user of `last`, if the kernel's write-back can do it."""
    user = _only_user(facts, last)
    if user is None:
        return None
    value = context.bindings[user]
    shape = static_shape(value)
    moves = is_call(value, "relax.reshape", "relax.permute_dims") and shape and value.args[0].same_as(last)
    if moves and value.op.name == "relax.reshape" and layout.reshaped is not None:
        return user, Step("relax.reshape", shape=shape), None
    if moves and value.op.name == "relax.permute_dims" and layout.permuted(permutation(value)) is not None:
        return user, Step("relax.permute_dims", shape=shape, axes=permutation(value)), None
    if not is_call(value, *UNARY, *BINARY) or shape != layout.shape:
        return None
    name = value.op.name
    if name in UNARY:
        return user, Step(name), None
    swapped = value.args[1].same_as(last)
    other = value.args[0] if swapped else value.args[1]
    constant = number(other)
    if constant is not None:
        return user, Step(name, constant=constant, swapped=swapped), None
    extent = static_shape(other)
    if extent is None or not layout.accepts(extent):
        return None
    return user, Step(name, operand=True, swapped=swapped), other
