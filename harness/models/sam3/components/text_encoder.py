"""Token ids to prompt features and their padding mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.models.sam3.components.component import EVERY_PRECISION, Arguments, Component

if TYPE_CHECKING:
    import torch

    from harness.models.sam3.capture import Activations


def build(model: Any) -> torch.nn.Module:
    """Tokens [B, 32] int64 to features [32, B, 256] and mask [B, 32] bool."""
    from harness.models.sam3.components.modules import TextEncoder

    return TextEncoder(model.backbone.language_backbone)


def samples(activations: Activations) -> dict[str, Arguments]:
    """The photograph's noun phrase; a batch from the empty text to one that fills many tokens."""
    import torch

    from harness.models.sam3.vocabulary import installed_tokenizer

    texts = ["", "a striped cat", "the ears, eyes & whiskers of every tabby kitten in this picture"]
    batch = torch.from_numpy(installed_tokenizer().tokenize(texts).ids)
    return {"text": {"tokens": activations.tokens}, "batch": {"tokens": batch}}


TEXT_ENCODER = Component(
    name="text_encoder",
    summary="token ids to prompt features and mask",
    inputs=("tokens",),
    outputs=("features", "mask"),
    build=build,
    samples=samples,
    emulated=EVERY_PRECISION,
)
