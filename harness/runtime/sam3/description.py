"""Defines SAM 3's part of a folder's manifest: the capacity of prompts, the tokenizer's vocabulary, its weights."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import astuple

from harness.runtime.decoding import convert
from harness.runtime.manifest import MANIFEST, ArtifactError, Manifest

NAME = "sam3"
"""The name of SAM 3 in manifests."""
SAM_3_1 = "sam3.1"
"""The name of SAM 3.1, whose folders answer prompts on images through the same entry points."""


class Capacity(Struct, frozen=True, forbid_unknown_fields=True):
    """The maximum length of one prompt.

    Attributes:
        points, boxes: Maximum numbers in a prompt that says what to look for. With the 32 tokens of the text and the
            CLS token, the defaults make a prompt of 128 tokens.
        clicks: Maximum number of points in a prompt for one object; 0 where the model answers no such prompts.
        video: Whether objects are tracked through videos; only a model that answers clicks does.
    """

    points: int = 47
    boxes: int = 48
    clicks: int = 0
    video: bool = False

    def includes(self, capacity: Capacity) -> bool:
        """Returns whether a model of this capacity answers every prompt that a model of the other capacity answers."""
        pairs = zip(astuple(self), astuple(capacity), strict=True)
        return all(count >= other_count for count, other_count in pairs)


DEFAULT_CLICKS = 16
"""The number of points that upstream's tracker reads (`max_point_num_in_prompt_enc` of `Sam3TrackerPredictor`)."""


class Sam3Description(Struct, frozen=True):
    """The facts about a compiled SAM 3 that its manifest has beside those of every model.

    Attributes:
        capacity: The maximum length of a prompt.
        vocabulary: Name of the tokenizer's vocabulary file.
        point_prompts: Whether the weights support points; weights in Transformers' layout do not.
    """

    capacity: Capacity
    vocabulary: str
    point_prompts: bool = True


def read_sam3_description(folder: Path, manifest: Manifest) -> Sam3Description:
    """Reads SAM 3's or SAM 3.1's part of a manifest.

    Args:
        folder: The folder of the manifest, which errors name.
        manifest: The manifest.

    Raises:
        ArtifactError: The folder has another model, or this part is damaged.
    """
    if manifest.model not in (NAME, SAM_3_1):
        raise ArtifactError(
            f"{folder} has the model {manifest.model}, not {NAME} or {SAM_3_1}: give a folder of one of them"
        )
    try:
        return convert(manifest.extra, Sam3Description)
    except ValueError as error:
        raise ArtifactError(f"{folder / MANIFEST} is damaged ({error}): compile the model again") from error
