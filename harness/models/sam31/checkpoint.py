"""Reads checkpoints of SAM 3.1, whose tensors have the model's names: those of `sam3.1_multiplex.pt`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.checkpoint_file import CheckpointDescription
from harness.core.errors import HarnessError
from harness.models.sam3.checkpoints.loading import Checkpoint
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

    def check(self) -> None:
        """Checks the names.

        Raises:
            HarnessError: They are those of another model.
        """
        if sam_3_1_name(self.content.tensors) is None:
            raise HarnessError(
                f"The checkpoint {self.path} is not of SAM 3.1, none of its {len(self.content.tensors)} tensors has a "
                "name of its tracker or necks: use sam3.1_multiplex.pt, or the model sam3 for weights of SAM 3."
            )


def describe_checkpoint(path: Path) -> CheckpointDescription:
    """Returns what a checkpoint is and can do; errors are those of `Sam31Checkpoint.open`."""
    checkpoint = Sam31Checkpoint.open(path, values=False)
    return CheckpointDescription(str(checkpoint), checkpoint.abilities)
