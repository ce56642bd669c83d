"""Extends TVM's importer by complex numbers: its type handling, and the choice of converters by types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from harness.compiler.lowering.frontends.rewriting import source_line
from harness.compiler.lowering.frontends.torch_export.complex_import.converters import CONVERTERS, is_complex

if TYPE_CHECKING:
    import tvm
    from torch.export import ExportedProgram

Converter = Callable[[Node, "ComplexImporter"], Any]

_PARTS = {torch.complex64: "float32", torch.complex128: "float64"}


class ComplexImporter(ExportedProgramImporter):  # type: ignore[misc]
    """An importer of programs with complex64 and complex128 tensors.

    A complex tensor of shape [...] is a real Relax tensor [..., 2] of its real and imaginary parts, float32 or float64:
    inputs, outputs, parameters, buffers, constants and all intermediate values. Calls without a complex operand or
    result are converted as by TVM's importer.
    """

    @staticmethod
    def _convert_data_type(input_type: Any, env: dict[Any, Any] | None = None) -> str:
        if input_type in _PARTS:
            return _PARTS[input_type]
        return str(ExportedProgramImporter._convert_data_type(input_type, env))

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor_value: torch.Tensor) -> tvm.runtime.Tensor:
        if tensor_value.is_complex():
            tensor_value = torch.view_as_real(tensor_value.detach().resolve_conj())
        return ExportedProgramImporter._convert_pytorch_tensor_to_tvm(tensor_value)

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
        convert_map = dict.fromkeys((*self._real, *CONVERTERS), _convert)
        return super().from_exported_program(exported_program, custom_convert_map=convert_map, **options)

    def convert_real(self, node: Node) -> Any:
        """Converts a call on real tensors."""
        return self._real[node.target.__name__](node, self)

    def _check_unsupported_func_type(self, nodes: Iterable[Node]) -> None:
        calls = [node for node in nodes if node.op == "call_function"]
        unsupported = [node for node in calls if _touches_complex(node) and node.target.__name__ not in CONVERTERS]
        if unsupported:
            sentences = (
                f"complex operator {node.target} is not handled yet, called at {source_line(node)}"
                for node in unsupported
            )
            raise NotImplementedError("; ".join(sentences))
        super()._check_unsupported_func_type([node for node in calls if not _touches_complex(node)])


def _with_importer_argument(converter: Callable[[Node], Any]) -> Converter:
    return lambda node, _importer: converter(node)


def _touches_complex(node: Node) -> bool:
    return any(is_complex(value) for value in (node, *node.all_input_nodes, *node.args))


def _convert(node: Node, importer: ComplexImporter) -> Any:
    return CONVERTERS[node.target.__name__](node, importer) if _touches_complex(node) else importer.convert_real(node)
