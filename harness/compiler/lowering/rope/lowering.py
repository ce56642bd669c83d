"""Defines the strategy `lowering`: a general pass turns an exported program's complex tensors into real pairs.

Upstream stays unchanged. The pass has no knowledge of RoPE or SAM 3:
`harness.compiler.lowering.frontends.torch_export.complex` takes any exported program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from harness.compiler.lowering.strategy import Strategy

if TYPE_CHECKING:
    import torch


def lower(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Lowers complex numbers by `lower_complex`."""
    from harness.compiler.lowering.frontends.torch_export.complex import lower_complex

    return lower_complex(program)


@contextmanager
def remove_traced_attributes(module: torch.nn.Module) -> Iterator[None]:
    """Removes attributes that modules set during a trace, at the end of the context.

    torch.export restores attributes that a forward assigns to, but leaves new attributes with the trace's fake tensors:
    SAM 3's tracker stores its table for another size in such an attribute.
    """
    attribute_names = {part: set(vars(part)) for part in module.modules()}
    try:
        yield
    finally:
        for part, names in attribute_names.items():
            for name in set(vars(part)) - names:
                delattr(part, name)


LOWERING = Strategy(
    name="lowering",
    summary="upstream untouched: a general pass turns complex tensors of the exported program into real pairs",
    apply=remove_traced_attributes,
    transform=lower,
)
