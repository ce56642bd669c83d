"""From a PyTorch module to an exported program."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def export_program(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """Exports `module` for the shapes and dtypes of `args`, with no gradient and in non-strict mode.

    Args:
        module: Takes tensors, returns a tensor or a tuple of tensors; in eval mode.
        args: Its positional inputs.

    Raises:
        torch.export's own errors, unchanged.
    """
    import torch

    fast_path = torch.backends.mha.get_fastpath_enabled()
    # the fused kernel behind nn.MultiheadAttention's fast path has no decomposition
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            return torch.export.export(module, args, strict=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
