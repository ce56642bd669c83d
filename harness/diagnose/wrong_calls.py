"""Builds a module of the compiled functions that compute the first wrong result, for TVM alone to compile.

A fault that only shows in the program does not show in operators that are compiled separately. It does show in the
program's compiled functions, whatever produced them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax, tirx

from harness.diagnose.pieces import Subgraph, replace_main

if TYPE_CHECKING:
    import numpy.typing as npt
    import tvm

    from harness.diagnose.flow import KernelCall

    Array = npt.NDArray[Any]


@dataclass(frozen=True)
class WrittenTensor:
    """Type of a tensor that a call writes: its shape, and TVM's name of its dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WrongCalls:
    """The calls that compute a wrong result from values of nodes, in order.

    Attributes:
        calls: The calls; the last one writes the result.
        only_tensors: Whether all arguments of the calls are tensors.
        inputs: PyTorch's values, by index, that the calls read and none of them writes.
        written: Types of the values that the calls write, by index.
        torch_value: PyTorch's value of the result.
        exact: The float64 value that follows from the inputs.
    """

    calls: Sequence[KernelCall]
    only_tensors: bool
    inputs: Mapping[int, Array]
    written: Mapping[int, WrittenTensor]
    torch_value: Array
    exact: Array

    def subgraph(self, code: tvm.IRModule, nodes: Mapping[int, str], sources: frozenset[str]) -> Subgraph | None:
        """Returns a module whose `main` calls the same functions; None if Relax cannot express that.

        Args:
            code: The lowered module, which contains the functions.
            nodes: By index of a value, the node whose value it is.
            sources: Names of the nodes that the result is computed from.
        """
        functions = {variable.name_hint: function for variable, function in code.functions_items()}
        functions_called = {call.function: functions.get(call.function) for call in self.calls}
        if not self.only_tensors or not all(
            isinstance(function, tirx.PrimFunc) for function in functions_called.values()
        ):
            return None
        builder = relax.BlockBuilder()
        global_vars = {name: builder.add_func(function, name) for name, function in functions_called.items()}
        names = {value: nodes.get(value, f"constant{value}") for value in self.inputs}
        values: dict[int, Any] = {
            value: relax.Var(names[value], relax.TensorType(array.shape, str(array.dtype)))
            for value, array in self.inputs.items()
        }
        parameters = list(values.values())
        bindings: list[relax.VarBinding] = []
        for call in self.calls:
            types = [relax.TensorType(self.written[value].shape, self.written[value].dtype) for value in call.outputs]
            arguments = relax.Tuple([values[value] for value in call.inputs])
            result_call = relax.call_tir(global_vars[call.function], arguments, types if len(types) > 1 else types[0])
            variable = relax.Var(f"value{len(bindings)}", relax.TupleType(types) if len(types) > 1 else types[0])
            bindings.append(relax.VarBinding(variable, result_call))
            if len(types) == 1:
                values[call.outputs[0]] = variable
                continue
            for n, value in enumerate(call.outputs):
                member = relax.Var(f"value{len(bindings)}", types[n])
                bindings.append(relax.VarBinding(member, relax.TupleGetItem(variable, n)))
                values[value] = member
        result = values[self.calls[-1].outputs[0]]
        return Subgraph(
            replace_main(builder.get(), bindings, result, parameters, ()),
            tuple(names.values()),
            tuple(np.asarray(array, order="C") for array in self.inputs.values()),
            sources,
            self.torch_value,
            self.exact,
            {},
        )
