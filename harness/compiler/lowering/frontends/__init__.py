"""Registers the frontends that convert a PyTorch module to a Relax module, one package each."""

from __future__ import annotations

from harness.compiler.lowering.frontends.frontend import Frontend
from harness.compiler.lowering.frontends.onnx.frontend import ONNX
from harness.compiler.lowering.frontends.torch_export.frontend import TORCH

FRONTENDS: dict[str, Frontend] = {frontend.name: frontend for frontend in (TORCH, ONNX)}
"""Every frontend by name, in the order of listings; a new frontend is one folder and one line here."""

EXPORTING_PROGRAMS = tuple(name for name, frontend in FRONTENDS.items() if frontend.exports_program)
"""Names of the frontends whose exchange format is an ExportedProgram."""
