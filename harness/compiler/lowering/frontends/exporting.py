"""Exports a PyTorch module as an exported program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from harness.compiler.lowering.frontends.rewriting import source_line
from harness.core.files import write_file
from harness.core.program import Axis


def export_program(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]] = ()
) -> torch.export.ExportedProgram:
    """Exports `module` for the shapes and dtypes of `args`, without gradients and in non-strict mode.

    Args:
        module: Takes tensors and returns a tensor or a tuple of tensors; in evaluation mode.
        args: Its positional inputs.
        axes: Symbolic axes of each input, by number; none by default.

    Raises:
        NotImplementedError: `module` changes a buffer, which would keep its first value; the message names the line.
        Exception: torch.export's own errors, unchanged.
    """
    program = _export(module, args, axes)
    _refuse_changed_buffers(program)
    return program


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Writes an exported program with its weights, which `torch.export.load` reads.

    Raises:
        HarnessError: The file cannot be written; the previous file is unchanged.
    """
    with write_file(path) as temporary, temporary.open("wb") as file:
        torch.export.save(program, file)


def _export(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]]
) -> torch.export.ExportedProgram:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # the fused kernel behind nn.MultiheadAttention's fast path has no decomposition
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            if not any(axes):
                return torch.export.export(module, args, strict=False)
            shapes = tuple(_dimensions(axes))
            return torch.export.export(module, _generalize(args, axes), dynamic_shapes=shapes, strict=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _refuse_changed_buffers(program: torch.export.ExportedProgram) -> None:
    """Raises NotImplementedError if an operator writes into a buffer, or into a view of one."""
    buffers = program.graph_signature.inputs_to_buffers
    for node in program.graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
            continue
        changed = node
        while isinstance(changed, Node) and isinstance(changed.target, OpOverload) and changed.args:
            if not (changed.target.is_view or changed.target._schema.is_mutable):
                break
            changed = changed.args[0]
        if isinstance(changed, Node) and changed.name in buffers:
            raise NotImplementedError(
                f"forward changes the buffer {buffers[changed.name]} at {source_line(node)}: "
                "make it an input and an output."
            )


def _dimensions(axes: Sequence[Mapping[int, Axis]]) -> Iterator[dict[int, Any]]:
    """Yields torch.export's dimensions of each input."""
    dimensions = {
        axis.name: torch.export.Dim(axis.name, min=axis.min, max=axis.max)
        for input_axes in axes
        for axis in input_axes.values()
    }
    for input_axes in axes:
        yield {number: dimensions[axis.name] for number, axis in input_axes.items()}


def _generalize(args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]]) -> tuple[torch.Tensor, ...]:
    """Returns inputs whose symbolic axes have at least extent 2, because torch.export makes a constant of extent 1."""
    general = []
    for tensor, input_axes in zip(args, axes, strict=True):
        shape = [max(extent, 2) if number in input_axes else extent for number, extent in enumerate(tensor.shape)]
        general.append(tensor if shape == list(tensor.shape) else tensor.new_zeros(shape))
    return tuple(general)
