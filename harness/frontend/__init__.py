"""torch.export and the Relax import, with one file for each importer defect that is worked around."""

from harness.frontend.exporting import export_program
from harness.frontend.importing import import_program

__all__ = ["export_program", "import_program"]
