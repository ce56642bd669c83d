"""Finds the operators with a kernel, with the elementwise operations that follow, and calls the kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from harness.compiler.schedules import UNTUNED, Schedules
from harness.compiler.schedules.common.folding import moved, row_starts
from harness.compiler.schedules.common.graph import MOVES, between, is_call, operator_name, permutation, static_shape
from harness.compiler.schedules.common.origins import join_tags
from harness.compiler.schedules.common.scope import scope_of
from harness.compiler.schedules.cpu.attention import key_layers, lower_attention
from harness.compiler.schedules.cpu.conv2d import lower_conv2d, lower_conv2d_transpose
from harness.compiler.schedules.cpu.epilogue import Epilogue, following_step
from harness.compiler.schedules.cpu.feed_forward import feed_forward
from harness.compiler.schedules.cpu.gemm import lower_matmul, rounded_left
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.microkernels.choice import micro_kernels
from harness.compiler.schedules.cpu.normalization import lower_layer_norm_2d, lower_rounded_layer_norm
from harness.compiler.schedules.cpu.operand_layer import movable
from harness.compiler.schedules.cpu.schedule import Workload
from harness.compiler.schedules.cpu.tile import vector_unit

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
                rewriter.grouping = _Grouping(_context_of(function, module, target, schedules))
                rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
        return rewriter.builder_.get()

    return run


def workloads(module: tvm.IRModule, target: tvm.target.Target) -> list[Workload]:
    """Returns the tunable workloads of an imported module, call by call."""
    workloads_found: list[Workload] = []
    module = relax.transform.CanonicalizeBindings()(module)
    for _, function in module.functions_items():
        if isinstance(function, relax.Function):
            context = _context_of(function, module, target, UNTUNED)
            _Grouping(context)
            workloads_found += context.workloads
    return workloads_found


def _context_of(
    function: relax.Function, module: tvm.IRModule, target: tvm.target.Target, schedules: Schedules
) -> Context:
    """Makes the context that lowerings ask about a function."""
    scope = scope_of(function)
    context = Context(
        scope.bindings,
        scope.users,
        scope.parameters,
        functions=dict(module.functions_items()),
        unit=vector_unit(target),
        kernels=micro_kernels(target),
        schedules=schedules,
    )
    context = replace(context, projected_afterwards=movable(context))
    return replace(context, key_layers=key_layers(context))


@dataclass(frozen=True)
class _Group:
    """Operators that one kernel computes.

    Attributes:
        lowering: The lowering of the first operator.
        computed: The variables of the operators in order: the first one's, and those of the epilogue.
        folded: The variables that the kernel reads through.
        epilogue: The operators that follow the first.
        operands: Operands of the epilogue.
    """

    lowering: Lowering
    computed: tuple[relax.Var, ...]
    folded: tuple[relax.Var, ...] = ()
    epilogue: Epilogue = field(default_factory=Epilogue)
    operands: tuple[relax.Expr, ...] = ()


@mutator
class _Rewriter(PyExprMutator):  # type: ignore[misc]
    """Calls the kernels of groups in place of their last operators."""

    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.grouping: _Grouping

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        group = self.grouping.groups.get(binding.var)
        if group is not None:
            inputs = [self.visit_expr(value) for value in (*group.lowering.inputs, *group.operands)]
            value = self.builder_.normalize(group.lowering.build(self.builder_, inputs, group.epilogue))
            variable = type(binding.var)(join_tags((*group.computed, *group.folded)), value.ty)
            self.builder_.emit_normalized(relax.VarBinding(variable, value))
            self.set_var_remap(binding.var, variable)
        elif binding.var not in self.grouping.covered:
            super().visit_var_binding_(binding)


class _Grouping:
    """Groups the operators of a function by the kernels that compute them.

    Attributes:
        groups: The groups by their last variable.
        covered: Variables that nothing computes by itself, because a kernel computes them on the way.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.groups: dict[relax.Var, _Group] = {}
        self.covered: set[relax.Var] = set(context.projected_afterwards)
        self.covered |= {variable for layer in context.key_layers.values() for variable in layer.bindings}
        for variable, value in context.bindings.items():
            lower = None if variable in self.covered else KERNELS.get(operator_name(value))
            lowering = None if lower is None else lower(context, value)
            if lowering is not None:
                self._add(self._with_epilogue(self._with_permutation(variable, value, lowering)))
        self._join_linear_layers()
        self._store_rounded()

    def _add(self, group: _Group) -> None:
        *covered, last = group.computed
        self.groups[last] = group
        self.covered.update(covered)
        self._context.results.add(last)

    def _with_permutation(self, variable: relax.Var, value: ir.Call, lowering: Lowering) -> _Group:
        """Returns the group of an operator, with the permutation that follows it if the kernel does that as well."""
        self._context.results.add(variable)
        arguments = [between(self._context.bindings, argument, lowering.inputs) for argument in value.args]
        group = _Group(lowering, (variable,), tuple(itertools.chain(*arguments)))
        user = self._context.only_user(variable)
        moves = user is not None and is_call(self._context.bindings[user], "relax.permute_dims")
        if not moves or lowering.permuted is None or self._is_read_as_rows(variable):
            return group
        permuted = lowering.permuted(permutation(self._context.bindings[user]))
        return group if permuted is None else replace(group, lowering=permuted, computed=(variable, user))

    def _with_epilogue(self, group: _Group) -> _Group:
        """Returns the group with the elementwise operators that follow it, as far as its write-back can do them."""
        computed, steps, operands, layout = list(group.computed), [], [], group.lowering.layout
        while layout is not None and (user := self._context.only_user(computed[-1])) is not None:
            following = following_step(self._context.bindings[user], computed[-1], layout)
            if following is None or user in self.groups or user in self.covered:
                break  # the sum of two products: the first one's write-back does it
            step, operand = following
            computed.append(user)
            steps.append(step)
            operands += [] if operand is None else [operand]
            layout = step.moved(layout)
        shapes = tuple(static_shape(operand) or () for operand in operands)
        return replace(
            group, computed=tuple(computed), epilogue=Epilogue(tuple(steps), shapes), operands=tuple(operands)
        )

    def _is_read_as_rows(self, variable: relax.Var) -> bool:
        """Returns whether only a matrix product reads a variable, and can read its rows where they lie."""
        bindings = self._context.bindings
        readers = (user for user in self._context.only_users(variable) if not is_call(bindings[user], *MOVES))
        reader = next((user for user in readers if not is_call(bindings[user], "relax.astype")), None)
        matmul = None if reader is None else bindings[reader]
        if matmul is None or not is_call(matmul, "relax.matmul"):
            return False
        rounded = rounded_left(self._context, matmul)
        left = matmul.args[0] if rounded is None else rounded
        shape = static_shape(left)
        if shape is None:
            return False
        folded = moved(self._context, left)
        return folded.inputs[0].same_as(variable) and bool(row_starts(folded, math.prod(shape[:-1]), shape[-1]))

    def _join_linear_layers(self) -> None:
        """Joins two linear layers in one kernel if the values between them are too large to store (`feed_forward`)."""
        for last, second in list(self.groups.items()):
            hidden = second.lowering.inputs[0]
            first = self.groups.get(hidden) if isinstance(hidden, relax.Var) else None
            if first is None:
                continue
            users = list(self._context.only_users(hidden))
            if second.computed[0] not in users:
                continue
            lowering = feed_forward(self._context, first.lowering, first.epilogue, second.lowering, len(first.operands))
            if lowering is None:
                continue
            del self.groups[hidden]
            self.groups[last] = replace(
                second,
                lowering=lowering,
                computed=(*first.computed, *second.computed),
                folded=(*first.folded, *second.folded),
                operands=(*first.operands, *second.operands),
            )
            self.covered.update((hidden, *users[: users.index(second.computed[0])]))

    def _store_rounded(self) -> None:
        """Makes kernels store bfloat16 for readers that round anyway: the same numbers in half the memory."""
        readers = {
            group.computed[0]: group.lowering.inputs[0] for group in self.groups.values() if group.lowering.rounds
        }

        def is_rounded(variable: relax.Var) -> bool:
            return self._all_round(readers, variable, (variable,))

        for last, group in list(self.groups.items()):
            if group.lowering.layout is not None and is_rounded(last):
                self.groups[last] = replace(group, epilogue=group.epilogue.rounded())
            elif group.lowering.rounded is not None and is_rounded(last):
                self.groups[last] = replace(group, lowering=group.lowering.rounded())
        for variable, value in self._context.bindings.items():
            if is_call(value, "relax.nn.layer_norm") and is_rounded(variable):
                lowering = lower_rounded_layer_norm(value)
                if lowering is not None:
                    self.groups[variable] = _Group(lowering, (variable,))

    def _all_round(
        self, readers: Mapping[relax.Var, relax.Expr], variable: relax.Var, views: tuple[relax.Var, ...]
    ) -> bool:
        """Returns whether every reader of a variable is a kernel that rounds it.

        Args:
            readers: The values that kernels read first and round, by their first operator.
            variable: The result of a kernel, or a moved form of it.
            views: The result, and those on the way to the variable that are views of it.
        """

        def rounds(user: relax.Var | None) -> bool:
            if user is None:
                return False
            if user in readers:
                return any(readers[user].same_as(one) for one in views)
            value = self._context.bindings[user]
            if is_call(value, "relax.permute_dims"):  # a kernel may read through it; what is copied stays fp32
                return self._all_round(readers, user, views)
            keeps = is_call(value, "relax.broadcast_to") and static_shape(value) == static_shape(value.args[0])
            if not keeps and not is_call(value, "relax.reshape", "relax.astype"):
                return False
            return self._all_round(readers, user, (*views, user) if variable in views else views)

        users = self._context.users.get(variable, [])
        return bool(users) and all(map(rounds, users))
