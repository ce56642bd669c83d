"""The calls of compiled functions that make the first wrong result, as a module that TVM alone compiles.

What is wrong in the program alone is not wrong in operators that are compiled by themselves. The compiled functions of
the program are, whatever made them so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax, tirx

from harness.diagnose.pieces import Piece, module_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import tvm

    from harness.diagnose.flow import KernelCall

    Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Written:
    """A tensor that a call writes: its shape, and TVM's name of its dtype."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WrongCalls:
    """The calls that make a wrong result from values of nodes, in order.

    Attributes:
        calls: The calls; the last one writes the result.
        only_tensors: Whether each takes nothing but tensors.
        given: What they read and none of them writes, by the number of the value: PyTorch's own values.
        written: What they write, by the number of the value.
        torch_value: PyTorch's value of the result.
        exact: The float64 value that follows from what is given.
    """

    calls: Sequence[KernelCall]
    only_tensors: bool
    given: Mapping[int, Array]
    written: Mapping[int, Written]
    torch_value: Array
    exact: Array

    def piece(self, code: tvm.IRModule, nodes: Mapping[int, str], sources: frozenset[str]) -> Piece | None:
        """Returns a module whose `main` calls the same functions; None if that cannot be said in Relax.

        Args:
            code: The lowered module, which has the functions.
            nodes: The node whose value it is, by the number of a value.
            sources: Names of the nodes from which the result is computed.
        """
        functions = {variable.name_hint: function for variable, function in code.functions_items()}
        called = {call.function: functions.get(call.function) for call in self.calls}
        if not self.only_tensors or not all(isinstance(function, tirx.PrimFunc) for function in called.values()):
            return None
        builder = relax.BlockBuilder()
        own = {name: builder.add_func(function, name) for name, function in called.items()}
        names = {value: nodes.get(value, f"constant{value}") for value in self.given}
        values: dict[int, Any] = {
            value: relax.Var(names[value], relax.TensorType(array.shape, str(array.dtype)))
            for value, array in self.given.items()
        }
        parameters = list(values.values())
        bindings: list[relax.VarBinding] = []
        for call in self.calls:
            types = [relax.TensorType(self.written[value].shape, self.written[value].dtype) for value in call.outputs]
            arguments = relax.Tuple([values[value] for value in call.inputs])
            made = relax.call_tir(own[call.function], arguments, types if len(types) > 1 else types[0])
            variable = relax.Var(f"value{len(bindings)}", relax.TupleType(types) if len(types) > 1 else types[0])
            bindings.append(relax.VarBinding(variable, made))
            if len(types) == 1:
                values[call.outputs[0]] = variable
                continue
            for n, value in enumerate(call.outputs):
                part = relax.Var(f"value{len(bindings)}", types[n])
                bindings.append(relax.VarBinding(part, relax.TupleGetItem(variable, n)))
                values[value] = part
        result = values[self.calls[-1].outputs[0]]
        return Piece(
            module_of(builder.get(), bindings, result, parameters, ()),
            tuple(names.values()),
            tuple(np.asarray(array, order="C") for array in self.given.values()),
            sources,
            self.torch_value,
            self.exact,
            {},
        )
