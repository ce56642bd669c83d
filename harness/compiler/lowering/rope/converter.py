"""Defines the strategy `converter`: an importer with complex numbers imports upstream's unchanged complex RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.compiler.lowering.strategy import Strategy

if TYPE_CHECKING:
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def _complex_importer() -> ExportedProgramImporter:
    from harness.compiler.lowering.frontends.torch_export.complex.importing import ComplexImporter

    return ComplexImporter()


CONVERTER = Strategy(
    name="converter",
    summary="upstream's complex64 RoPE, untouched, carried by the importer as real tensors with a last dimension of 2",
    importer=_complex_importer,
)
