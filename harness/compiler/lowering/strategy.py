"""Defines a strategy, which brings rotary position encoding (complex64 upstream) through the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def _unchanged_module(_module: torch.nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _unchanged_program(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    return program


def _default_importer() -> ExportedProgramImporter | None:
    return None


@dataclass(frozen=True)
class Strategy:
    """One way to bring complex RoPE through the compiler.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        apply: Changes the module for the duration of the context, so that torch.export sees the strategy's form;
            restores the module and upstream's classes afterwards.
        transform: Takes the exported program and returns the program to import, without changing its argument.
        converters: Makes additional converters for TVM's importer, by operator name as in its `custom_convert_map`;
            called only when TVM is needed.
        importer: Makes the importer that translates the program; TVM's importer if it returns None.
        symbolic: Whether the strategy takes tensors with symbolic extents.
    """

    name: str
    summary: str
    apply: Callable[[torch.nn.Module], AbstractContextManager[None]] = _unchanged_module
    transform: Callable[[torch.export.ExportedProgram], torch.export.ExportedProgram] = _unchanged_program
    converters: Callable[[], Mapping[str, Callable[..., Any]]] = dict
    importer: Callable[[], ExportedProgramImporter | None] = _default_importer
    symbolic: bool = False

    @property
    def needs_program(self) -> bool:
        """Returns whether the strategy works on an ExportedProgram or its import, and not on the module alone."""
        steps = (self.transform, self.converters, self.importer)
        return steps != (_unchanged_program, dict, _default_importer)
