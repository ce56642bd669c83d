"""Reads checkpoints of SAM 3.1, whose tensors have the model's names: those of `sam3.1_multiplex.pt`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.checkpoint_file import CheckpointDescription
from harness.core.errors import HarnessError
from harness.models.sam3.checkpoints.content import read_content
from harness.models.sam3.checkpoints.loading import Checkpoint, load_opened
from harness.models.sam3.checkpoints.names import sam_3_1_name

if TYPE_CHECKING:
    import torch


class Sam31Checkpoint(Checkpoint):
    """A checkpoint of SAM 3.1, which may fit a model or not."""

    model = "SAM 3.1"
    has_transformers_names = False
    has_tracker = True

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in the model."""
        return dict(self.content.tensors)


def open_checkpoint(path: Path, *, values: bool = True) -> Sam31Checkpoint:
    """Reads a checkpoint of SAM 3.1, with the values of its tensors or without.

    Raises:
        HarnessError: It cannot be read, or is of another model.
    """
    checkpoint = Sam31Checkpoint(path, read_content(path, values=values))
    if sam_3_1_name(checkpoint.content.tensors) is None:
        raise HarnessError(
            f"The checkpoint {path} is not of SAM 3.1, none of its {len(checkpoint.content.tensors)} tensors has a "
            "name of its tracker or necks: use sam3.1_multiplex.pt, or the model sam3 for weights of SAM 3."
        )
    return checkpoint


def describe_checkpoint(path: Path) -> CheckpointDescription:
    """Returns what a checkpoint is and can do; errors are those of `open_checkpoint`."""
    checkpoint = open_checkpoint(path, values=False)
    return CheckpointDescription(str(checkpoint), checkpoint.abilities)


def load_checkpoint(model: torch.nn.Module, path: Path, *, allow_partial: bool = False) -> frozenset[str]:
    """Loads a checkpoint into the model, as `harness.models.sam3.checkpoints.loading.load_checkpoint` does."""
    return load_opened(model, open_checkpoint(path), allow_partial=allow_partial)
