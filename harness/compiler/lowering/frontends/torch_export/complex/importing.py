"""Extends TVM's importer by complex numbers: it applies the rules of the pass to one call after the other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from harness.compiler.lowering.frontends.rewriting import value_of
from harness.compiler.lowering.frontends.torch_export.complex.lowering import RULES
from harness.compiler.lowering.frontends.torch_export.complex.values import (
    Interleaved,
    Pair,
    Value,
    Writer,
    as_real,
    is_complex,
    real_dtype,
    touches_complex,
    unsupported,
)

if TYPE_CHECKING:
    import tvm
    from torch.export import ExportedProgram

Converter = Callable[[Node, "ComplexImporter"], Any]


class ComplexImporter(ExportedProgramImporter):  # type: ignore[misc]
    """An importer of programs with complex64 and complex128 tensors.

    A complex input, output, parameter, buffer or constant of shape [...] is a real Relax tensor [..., 2] of its real
    and imaginary parts, float32 or float64. In between they are two tensors. Calls without a complex operand or result
    are converted as by TVM's importer.
    """

    @staticmethod
    def _convert_data_type(input_type: Any, env: dict[Any, Any] | None = None) -> str:
        return str(ExportedProgramImporter._convert_data_type(real_dtype(input_type), env))

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor_value: torch.Tensor) -> tvm.runtime.Tensor:
        return ExportedProgramImporter._convert_pytorch_tensor_to_tvm(as_real(tensor_value.detach()))

    def create_convert_map(self) -> dict[str, Callable[[Node], Any]]:
        """Returns the converters with the lazy negation, which imaginary parts of conjugates leave on real tensors."""
        convert_map: dict[str, Callable[[Node], Any]] = super().create_convert_map()
        return {"_neg_view.default": self._unary_op(relax.op.negative), **convert_map}

    def create_input_vars(self, exported_program: ExportedProgram) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Returns the variables of parameters and inputs, complex ones with a last dimension of 2, and the ranges."""
        parameters, inputs, ranges = super().create_input_vars(exported_program)
        for placeholder in exported_program.graph.find_nodes(op="placeholder"):
            if is_complex(placeholder):
                variables = inputs if placeholder.name in inputs else parameters
                variable = variables[placeholder.name]
                shape = [*variable.ty.shape, 2]
                variables[placeholder.name] = relax.Var(
                    placeholder.name, relax.TensorType(shape, variable.ty.dtype.dtype)
                )
        return parameters, inputs, ranges

    def from_exported_program(
        self, exported_program: ExportedProgram, *, custom_convert_map: Mapping[str, Converter], **options: bool
    ) -> tvm.IRModule:
        """Imports a program; `custom_convert_map` converts the calls without complex operands or results."""
        self._real = {name: _with_importer_argument(converter) for name, converter in self.convert_map.items()}
        self._real |= custom_convert_map
        self._writer = Writer(Graph())
        self._values: dict[Node, Value] = {}
        names = (*self._real, *(target.__name__ for target in RULES))
        with torch.no_grad():
            module = super().from_exported_program(
                exported_program, custom_convert_map=dict.fromkeys(names, _convert), **options
            )
        for call in self._writer.graph.nodes:
            del self.env[call]
        return relax.transform.DeadCodeElimination()(module)  # one part may be enough

    def convert_real(self, node: Node) -> Any:
        """Converts a call on real tensors."""
        name = node.target.__name__
        if name not in self._real:
            raise unsupported(self._writer.source, f"needs {name}, which TVM's importer does not know,")
        return self._real[name](node, self)

    def convert_complex(self, node: Node) -> Any:
        """Converts a call with a complex operand or result; returns None for a pair that only rules read."""
        self._writer.source = node
        args, kwargs = map_arg((node.args, node.kwargs), self._value)
        is_item = node.target is operator.getitem
        value = args[0][args[1]] if is_item else RULES[node.target](self._writer, *args, **kwargs)
        self._values[node] = value
        is_output = any(user.op == "output" for user in node.users)
        if isinstance(value, Interleaved) or (isinstance(value, Pair) and is_output):
            value = self._writer.real(value)
        for call in self._writer.calls:
            self.env[call] = self.convert_real(call)
        self._writer.calls.clear()
        return self.env[value] if isinstance(value, Node) else None

    def _value(self, node: Node) -> Value:
        """Returns the value of a node for the rules, which know a Relax tensor as an input of their graph."""
        if node not in self._values:
            placeholder = self._writer.graph.placeholder(node.name)
            placeholder.meta["val"] = as_real(value_of(node))
            self.env[placeholder] = self.env[node]
            self._values[node] = self._writer.unpacked(placeholder) if is_complex(node) else placeholder
        return self._values[node]

    def _check_unsupported_func_type(self, nodes: Iterable[Node]) -> None:
        calls = [node for node in nodes if node.op == "call_function"]
        for node in calls:
            if touches_complex(node) and node.target not in RULES and node.target is not operator.getitem:
                raise unsupported(node)
        super()._check_unsupported_func_type([node for node in calls if not touches_complex(node)])


def _with_importer_argument(converter: Callable[[Node], Any]) -> Converter:
    return lambda node, _importer: converter(node)


def _convert(node: Node, importer: ComplexImporter) -> Any:
    return importer.convert_complex(node) if touches_complex(node) else importer.convert_real(node)
