"""Strategy `lowering`: upstream untouched; a general pass turns the exported program's complex tensors into real pairs.

Nothing here knows of RoPE or of SAM 3: `harness.frontend.complex` takes any exported program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.rope.strategy import Strategy

if TYPE_CHECKING:
    import torch


def lower(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`lower_complex`, with the operators left whole that the import wants whole."""
    from harness.frontend.complex import lower_complex
    from harness.frontend.defects.attention import KEPT

    return lower_complex(program, keep=KEPT)


LOWERING = Strategy(
    name="lowering",
    summary="upstream untouched: a general pass turns complex tensors of the exported program into real pairs",
    transform=lower,
)
