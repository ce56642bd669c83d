"""Strategy: one way to get rotary position encoding (complex64 upstream) through the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def _no_change(_module: torch.nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _as_exported(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    return program


def _tvms_own() -> ExportedProgramImporter | None:
    return None


@dataclass(frozen=True)
class Strategy:
    """One way to get complex RoPE through the compiler.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        apply: Changes the module for the duration of the context, so that torch.export sees the strategy's form; leaves
            module and upstream classes as they were afterwards.
        transform: Takes the exported program, returns the one to import; leaves its argument as it was.
        converters: Makes additional converters for TVM's importer, by operator name as in its `custom_convert_map`;
            called when they are needed, since they need TVM.
        importer: Makes the importer that translates the program; TVM's own by default.
        symbolic: Whether it takes tensors with symbolic extents.
    """

    name: str
    summary: str
    apply: Callable[[torch.nn.Module], AbstractContextManager[None]] = _no_change
    transform: Callable[[torch.export.ExportedProgram], torch.export.ExportedProgram] = _as_exported
    converters: Callable[[], Mapping[str, Callable[..., Any]]] = dict
    importer: Callable[[], ExportedProgramImporter | None] = _tvms_own
    symbolic: bool = False
