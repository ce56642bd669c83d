"""Strategy `lowering`: upstream untouched; a general pass turns the exported program's complex tensors into real pairs.

Nothing here knows of RoPE or of SAM 3: `harness.lowering.frontends.torch_export.complex` takes any exported program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from harness.lowering.strategy import Strategy

if TYPE_CHECKING:
    import torch


def lower(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Calls `lower_complex`, and leaves whole the operators that the import wants whole."""
    from harness.lowering.frontends.torch_export.complex import lower_complex
    from harness.lowering.frontends.torch_export.defects.attention import KEPT

    return lower_complex(program, keep=KEPT)


def nothing_left_behind(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Takes away what modules keep of a traced call.

    torch.export puts attributes back that a forward assigns to, but leaves new ones, with the fake tensors of the trace
    in them: SAM 3's tracker keeps its table for another size that way.
    """
    return _nothing_left_behind(module)


@contextmanager
def _nothing_left_behind(module: torch.nn.Module) -> Iterator[None]:
    before = {part: set(vars(part)) for part in module.modules()}
    try:
        yield
    finally:
        for part, names in before.items():
            for name in set(vars(part)) - names:
                delattr(part, name)


LOWERING = Strategy(
    name="lowering",
    summary="upstream untouched: a general pass turns complex tensors of the exported program into real pairs",
    apply=nothing_left_behind,
    transform=lower,
)
