"""Exports modules by torch.export and imports them into Relax, with a workaround for every defect of the importer."""

from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.torch_export.importing import import_program, nodes_of

__all__ = ["export_program", "import_program", "nodes_of"]
