"""Imports an exported program as a Relax module, with a workaround for every known defect of TVM's importer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export import defects
from harness.compiler.lowering.frontends.torch_export.lifting import decompose_and_lift, drop_unread, parameter_values
from harness.compiler.lowering.frontends.torch_export.slices import mark_inbound_slices

_NODES = "nodes"
"""Attribute of an imported function: name of each node → name of the variable that holds its value."""


def import_program(
    program: torch.export.ExportedProgram,
    converters: Mapping[str, Callable[..., Any]] | None = None,
    importer: ExportedProgramImporter | None = None,
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Imports an exported program.

    Args:
        program: The result of `export_program`; it is not changed.
        converters: Converters of more operators, by name as in the importer's `custom_convert_map`; they take
            precedence over the defects'.
        importer: Translates the program; TVM's importer by default.

    Returns:
        The module and its parameters. The module's `main` takes the user inputs in order (their number is its attribute
        `num_input`), then every weight, buffer and constant tensor that the graph reads. The values of the latter are
        returned by name in the order of the parameters, and contiguous values share memory with the program; complex
        values are pairs, with a last dimension of 2. Constants of one element are bound into the module. `main` returns
        a tuple of the outputs in order, and notes the variable that holds each node's value (`nodes_of`).

    Raises:
        NotImplementedError: TVM's importer does not know a dtype, such as complex64; the message is TVM's.
        AssertionError: TVM's importer does not know an operator, which the message names.
    """
    program = decompose_and_lift(program)
    for defect in defects.DEFECTS:
        for graph_pass in defect.passes:
            graph_pass(program.graph_module)
    drop_unread(program)
    convert_map = {name: converter for defect in defects.DEFECTS for name, converter in defect.converters.items()}
    convert_map |= dict(converters or {})
    importer = importer or ExportedProgramImporter()
    module = importer.from_exported_program(
        program,
        keep_params_as_input=True,
        unwrap_unit_return_tuple=False,
        no_bind_return_tuple=False,
        custom_convert_map=convert_map,
    )
    holding = {node.name: value.name for node, value in importer.env.items() if isinstance(value, relax.Var)}
    module["main"] = module["main"].without_attr("params").with_attr(_NODES, json.dumps(holding))
    return mark_inbound_slices(module), parameter_values(program)


def import_module(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Exports and imports a module; results and errors are those of `export_program` and `import_program`."""
    return import_program(export_program(module, args))


def import_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tvm.IRModule:
    """Exports a module and imports it as TVM's documentation does, without workarounds."""
    with torch.no_grad():
        return from_exported_program(torch.export.export(module, args, strict=False))


def nodes_of(module: tvm.IRModule) -> dict[str, str]:
    """Returns the name of the variable that holds each node's value, by the node's name in the imported graph.

    Nodes whose value is in several variables, or in none, are left out.
    """
    holding: dict[str, str] = json.loads(str((module["main"].attrs or {}).get(_NODES, "{}")))
    return holding
