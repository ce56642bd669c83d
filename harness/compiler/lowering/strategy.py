"""Defines a strategy, which brings rotary position encoding (complex64 upstream) through the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


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
    apply: Callable[[torch.nn.Module], AbstractContextManager[None]] = lambda module: nullcontext()
    transform: Callable[[torch.export.ExportedProgram], torch.export.ExportedProgram] = lambda program: program
    converters: Callable[[], Mapping[str, Callable[..., Any]]] = dict
    importer: Callable[[], ExportedProgramImporter | None] = lambda: None
    symbolic: bool = False

    @property
    def needs_program(self) -> bool:
        """Returns whether the strategy works on an ExportedProgram or its import, and not on the module alone."""
        defaults = (Strategy.transform, Strategy.converters, Strategy.importer)
        return (self.transform, self.converters, self.importer) != defaults
