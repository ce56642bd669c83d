"""Converts complex tensors at the interface of a lowered program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree


def as_real(value: Any) -> Any:
    """Returns a complex tensor [...] as a real tensor [..., 2]; any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value


def as_complex(value: torch.Tensor) -> torch.Tensor:
    """Returns a real tensor [..., 2] as a complex tensor [...]."""
    return torch.view_as_complex(value.contiguous())


def complex_outputs(program: ExportedProgram) -> tuple[bool, ...]:
    """Returns, for each user output of a program in order, whether it is a complex tensor."""
    (output,) = program.graph.find_nodes(op="output")
    specs = program.graph_signature.output_specs
    return tuple(
        isinstance(node, torch.fx.Node) and isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].is_complex()
        for node, spec in zip(output.args[0], specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    )


def complex_call(program: ExportedProgram, lowered: ExportedProgram) -> Callable[..., Any]:
    """Returns a function that runs a lowered program in PyTorch, with the arguments and results of the original one.

    Args:
        program: The program with complex tensors.
        lowered: The result of `lower_complex`.
    """
    module, is_complex = lowered.module(), complex_outputs(program)

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(as_real, (args, kwargs))
        results, structure = pytree.tree_flatten(module(*args, **kwargs))
        changed = [as_complex(r) if complex_ else r for r, complex_ in zip(results, is_complex, strict=True)]
        return pytree.tree_unflatten(changed, structure)

    return call
