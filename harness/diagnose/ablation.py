"""The cause of a divergence: the operators of one kernel are computed again, each time with more of this project."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm
from tvm import ir, relax, tirx

from harness.diagnose.comparing import array_of
from harness.diagnose.deviation import Deviation, deviation
from harness.diagnose.diagnosis import Ablation, Cause, Experiment
from harness.diagnose.reference import Reference
from harness.lowering.frontends.running import run_module
from harness.runtime.executable import Executable
from harness.schedules.common.origins import bindings_of
from harness.schedules.common.vm import lower_to_vm
from harness.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from harness.lowering.frontends.torch_export.graph import Graph
    from harness.schedules import Schedules
    from harness.targets.target import Target

    Array = npt.NDArray[Any]

Run = Callable[[tvm.IRModule, Sequence["Array"]], list["Array"]]
"""Compiles a module, and calls its `main` with values of all its parameters."""


@dataclass(frozen=True)
class Piece:
    """The part of an imported module that one kernel computes.

    Attributes:
        module: Its `main` takes the values of some nodes, then weights, and returns a tuple of one tensor.
        arguments: Values of its parameters, PyTorch's own.
        torch_value: PyTorch's value of the result.
        exact: The float64 value that follows from the same arguments.
    """

    module: tvm.IRModule
    arguments: tuple[Array, ...]
    torch_value: Array
    exact: Array

    def judged(self, outputs: Sequence[Array]) -> Deviation:
        """Returns the error of what a run of the module returned."""
        return deviation(outputs[0].reshape(self.torch_value.shape), self.torch_value, self.exact)


def piece_of(
    module: tvm.IRModule,
    holding: Mapping[str, str],
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    node: str,
    sources: Iterable[str],
) -> Piece:
    """Cuts the operators between some nodes and another out of an imported module.

    Args:
        module: As imported.
        holding: The variable that holds each node's value (`nodes_of`).
        graph: The nodes.
        inputs: The program's inputs.
        node: Name of the node to compute.
        sources: Names of the nodes to compute it from.
    """
    main = relax.transform.CanonicalizeBindings()(module)["main"]
    bound = {binding.var.name: binding for binding in bindings_of(main)}
    weights = {parameter.name for parameter in main.params[int(main.attrs["num_input"]) :]}
    result = bound[holding[node]].var
    limits = [name for name in sources if name != node]
    stops = {holding[name] for name in limits if name in holding}
    kept: set[str] = set()
    read: dict[str, relax.Var] = {}
    waiting: list[relax.Var] = [result]
    while waiting:
        variable = waiting.pop()
        if variable.name in bound and variable.name not in stops:
            if variable.name not in kept:
                kept.add(variable.name)
                waiting.extend(relax.analysis.free_vars(bound[variable.name].value))
        else:
            read[variable.name] = variable
    parameters = sorted(read.values(), key=lambda variable: variable.name in weights)
    cut = _module(module, [binding for name, binding in bound.items() if name in kept], result, parameters, weights)
    node_of = {variable: name for name, variable in reversed(list(holding.items()))}
    names = [node_of[variable.name] for variable in parameters]
    reference = Reference(graph, inputs, [*names, *limits, node], [])
    values = [array_of(reference.fp32(name)) for name in names]
    return Piece(
        cut,
        tuple(value.reshape(_shape(variable)) for value, variable in zip(values, parameters, strict=True)),
        array_of(reference.fp32(node)),
        array_of(reference.locally_exact(node, limits)),
    )


def ablate(piece: Piece, target: Target, tvm_target: tvm.target.Target, schedules: Schedules) -> Ablation:
    """Computes a piece in ways that have more and more of this project in them, until one is wrong.

    Args:
        piece: From `piece_of`.
        target: What the program was compiled for.
        tvm_target: The same as TVM's.
        schedules: What tuning found.
    """
    from harness.schedules.cpu.pipeline import LEGALIZE

    plain = tvm.transform.Sequential([relax.transform.LegalizeOps(dict(LEGALIZE)), lower_to_vm()])

    def whole(module: tvm.IRModule, arguments: Sequence[Array]) -> list[Array]:
        with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
            library = Path(folder) / f"piece{LIBRARY_SUFFIX}"
            build_library(lower_module(module, target, tvm_target, schedules), tvm_target, library)
            inputs = int(module["main"].attrs["num_input"])
            return Executable(library, target.device(), arguments[inputs:]).run(arguments[:inputs])

    def apart(pipeline: tvm.transform.Pass | None) -> Run:
        return lambda module, arguments: run_module(module, arguments, tvm_target, pipeline)

    ways: tuple[tuple[Cause, Callable[[], list[Array]]], ...] = (
        (Cause.IMPORTER, lambda: apart(None)(_without_weights(piece.module), piece.arguments)),
        (Cause.LEGALIZATION, lambda: apart(plain)(_without_weights(piece.module), piece.arguments)),
        (Cause.SCHEDULE, lambda: _one_by_one(piece, whole)),
        (Cause.FUSION, lambda: whole(piece.module, piece.arguments)),
    )
    experiments: list[Experiment] = []
    for cause, run in ways:
        try:
            found = Experiment(cause, piece.judged(run()))
        except Exception as error:  # what TVM cannot compile in this way decides nothing
            found = Experiment(cause, None, (str(error).strip() or type(error).__name__).splitlines()[-1])
        experiments.append(found)
        if found.result is not None and found.result.excess > 1:
            return Ablation(tuple(experiments), cause)
    return Ablation(tuple(experiments), None if experiments[-1].result is None else Cause.RUNTIME)


def _one_by_one(piece: Piece, run: Run) -> list[Array]:
    """Computes each operator in a module of its own, from the results of those before."""
    main = piece.module["main"]
    inputs = int(main.attrs["num_input"])
    weights = {parameter.name for parameter in main.params[inputs:]}
    values: dict[relax.Var, Any] = dict(zip(main.params, piece.arguments, strict=True))
    for binding in bindings_of(main):
        value, variable = binding.value, binding.var
        if isinstance(value, ir.Call):
            parameters = sorted(relax.analysis.free_vars(value), key=lambda used: used.name in weights)
            varies = any(used.name not in weights for used in parameters)
            single = _module(piece.module, [binding], variable, parameters, weights if varies else ())
            weights |= set() if varies else {variable.name}
            outputs = run(single, [values[used] for used in parameters])
            values[variable] = outputs if isinstance(variable.ty, relax.TupleType) else outputs[0]
        else:
            values[variable] = _taken(value, values)
    return list(values[main.body.body])


def _taken(value: Any, values: Mapping[relax.Var, Any]) -> Any:
    """Returns the value of a tuple, of a part of one, of a variable or of a constant."""
    if isinstance(value, relax.Tuple):
        return [_taken(part, values) for part in value.fields]
    if isinstance(value, relax.TupleGetItem):
        return values[value.tuple_value][value.index]
    return value.value.numpy() if isinstance(value, ir.GenericConst) else values[value]


def _module(
    module: tvm.IRModule,
    bindings: Sequence[relax.VarBinding],
    result: relax.Var,
    parameters: Sequence[relax.Var],
    weights: Collection[str],
) -> tvm.IRModule:
    """Returns the module with another `main`: bindings of its own, whose free variables are parameters."""
    given = [relax.Var(variable.name, variable.ty) for variable in parameters]
    single = result if isinstance(result.ty, relax.TupleType) else relax.Tuple([result])
    output = relax.Var("outputs", single.ty if isinstance(single, relax.Var) else relax.TupleType([result.ty]))
    block = relax.DataflowBlock(
        [
            *(relax.VarBinding(variable, new) for variable, new in zip(parameters, given, strict=True)),
            *bindings,
            relax.VarBinding(output, single),
        ]
    )
    function = relax.Function(given, relax.SeqExpr([block], output), output.ty).with_attr("global_symbol", "main")
    cut = module.clone()
    cut["main"] = function.with_attr("num_input", sum(variable.name not in weights for variable in parameters))
    return relax.transform.CanonicalizeBindings()(cut)


def _without_weights(module: tvm.IRModule) -> tvm.IRModule:
    """Returns the module with weights as ordinary inputs."""
    changed = module.clone()
    changed["main"] = module["main"].without_attr("num_input")
    return changed


def _shape(variable: relax.Var) -> tuple[int, ...]:
    """Returns the shape for NumPy, with -1 for a symbolic extent, which follows from the size of a value."""
    return tuple(int(extent) if isinstance(extent, tirx.IntImm) else -1 for extent in variable.ty.shape)
