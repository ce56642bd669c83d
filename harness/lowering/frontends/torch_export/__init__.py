"""torch.export and the Relax import, with one file for each importer defect that is worked around."""

from harness.lowering.frontends.exporting import export_program
from harness.lowering.frontends.torch_export.importing import import_program, nodes_of

__all__ = ["export_program", "import_program", "nodes_of"]
