"""From an exported program to a Relax module, with every known defect of TVM's importer worked around."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_NODES = "nodes"
"""The attribute of an imported function that says which variable holds the value of which node."""


def import_program(
    program: torch.export.ExportedProgram,
    converters: Mapping[str, Callable[..., Any]] | None = None,
    importer: ExportedProgramImporter | None = None,
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Imports an exported program.

    Args:
        program: From `export_program`; it is not changed.
        converters: Of more operators, by name as in the importer's `custom_convert_map`; they come before the defects'.
        importer: Translates the program; TVM's own by default.

    Returns:
        The module and its parameters. The module's `main` takes the user inputs in order (their number is its attribute
        `num_input`), then every weight, buffer and constant tensor that the graph reads; the values of the latter are
        returned by name in the order of the parameters, sharing memory with the program where they are contiguous;
        complex ones as pairs, with a last dimension of 2.
        Constants of one element are bound into the module. `main` returns a tuple of the outputs in order, and keeps
        which variable holds the value of which node (`nodes_of`).

    Raises:
        NotImplementedError: A dtype that TVM's importer does not know, such as complex64 (its own message).
        AssertionError: An operator that it does not know, named in the message.
    """
    from tvm import relax
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    from harness.lowering.frontends.torch_export.defects import DEFECTS
    from harness.lowering.frontends.torch_export.lifting import decompose_and_lift, drop_unread, parameter_values
    from harness.lowering.frontends.torch_export.slices import within_bounds

    program = decompose_and_lift(program)
    for defect in DEFECTS:
        for graph_pass in defect.passes:
            graph_pass(program.graph_module)
    drop_unread(program)
    every = {name: converter for defect in DEFECTS for name, converter in defect.converters.items()}
    every |= dict(converters or {})
    importer = importer or ExportedProgramImporter()
    module = importer.from_exported_program(
        program,
        keep_params_as_input=True,
        unwrap_unit_return_tuple=False,
        no_bind_return_tuple=False,
        custom_convert_map=every,
    )
    holding = {node.name: value.name for node, value in importer.env.items() if isinstance(value, relax.Var)}
    module["main"] = module["main"].without_attr("params").with_attr(_NODES, json.dumps(holding))
    return within_bounds(module), parameter_values(program)


def nodes_of(module: tvm.IRModule) -> dict[str, str]:
    """Returns the name of the variable that holds each node's value, by the name of the node in the imported graph.

    A node is not in it if several variables hold its value, or none.
    """
    holding: dict[str, str] = json.loads(str((module["main"].attrs or {}).get(_NODES, "{}")))
    return holding
