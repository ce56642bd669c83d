"""Tells everything about a checkpoint: its layout, dtypes, size and checksums, which scale it fits, what it can do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness.core.case import Scale
from harness.core.checkpoint_file import checkpoint_digest, find_checkpoint
from harness.models.sam3.build import build_architecture
from harness.models.sam3.checkpoints.loading import Checkpoint, Fit, check_sam_3, compare, spoilt_names
from harness.models.sam3.scales import SCALES

_BLOCK = re.compile(r"(?:detector\.)?backbone\.vision_backbone\.trunk\.blocks\.(\d+)\..*")


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Returns everything that is known about a checkpoint of SAM 3, as JSON has it; nothing is loaded.

    `does` is empty if it cannot be loaded as a whole.

    Raises:
        HarnessError: It cannot be read or is no checkpoint of SAM 3.
    """
    checkpoint = Checkpoint.open(path)
    check_sam_3(checkpoint)
    build = partial(build_architecture, interactive=checkpoint.has_tracker)
    return describe_opened(checkpoint, build)


def describe_opened(checkpoint: Checkpoint, build: Callable[[str], Any]) -> dict[str, Any]:
    """Returns what `inspect_checkpoint` does about an opened checkpoint.

    Args:
        checkpoint: The checkpoint.
        build: Builds its model at a scale.
    """
    path, tensors = checkpoint.path, checkpoint.content.tensors
    digest = checkpoint_digest(path)
    scale, fit = _fit(checkpoint, build)
    spoilt = spoilt_names(tensors)
    loads = fit.is_whole and not spoilt and not checkpoint.content.unknown
    return {
        "checkpoint": str(checkpoint),
        "files": [str(file) for file in find_checkpoint(path).all],
        "bytes": digest.bytes,
        "sha256": digest.sha256,
        "layout": "Transformers" if checkpoint.has_transformers_names else "upstream",
        "wrappers": list(checkpoint.content.wrappers),
        "left aside": dict(checkpoint.content.remainder),
        "computed anew": list(checkpoint.repeated),
        "merged": list(checkpoint.content.merged),
        "dtypes": Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        "tensors": len(tensors),
        "numbers": sum(tensor.numel() for tensor in tensors.values()),
        "unknown": dict(checkpoint.content.unknown),
        "not finite": spoilt,
        "scale": scale if fit.is_whole else None,
        "difference": "" if fit.is_whole else f"to scale {scale}: {fit}",
        "with --allow-partial": ""
        if fit.is_whole
        else f"{len(fit.unloaded)} of {fit.count} tensors stay at their seed",
        "unused": list(fit.unused),
        "does": list(checkpoint.abilities) if loads else [],
    }


def _fit(checkpoint: Checkpoint, build: Callable[[str], Any]) -> tuple[str, Fit]:
    """Returns the scale that a checkpoint fits or differs least from, of those with its number of blocks, and how."""
    blocks = {match[1] for name in checkpoint.tensors if (match := _BLOCK.fullmatch(name))}
    depths = {scale: settings.get("ViT", {}).get("depth") for scale, settings in SCALES.items()}
    scales = [scale for scale, depth in depths.items() if depth == len(blocks)]
    fits = {scale: compare(checkpoint, build(scale)) for scale in scales or [Scale.FULL.value]}
    return min(fits.items(), key=lambda item: len(item[1].missing) + len(item[1].unexpected) + len(item[1].misshapen))
