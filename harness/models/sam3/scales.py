"""Defines the scales: the published model, the same with fewer repeated layers, and one with narrow encoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from harness.core.case import TINY
from harness.core.errors import HarnessError
from harness.models.sam3.patches.patch import replaced

SCALES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "full": {},
    "shallow": {
        "ViT": {"depth": 2, "global_att_blocks": (1,)},
        "VETextEncoder": {"layers": 2},
        "SequenceGeometryEncoder": {"num_layers": 2},
        "TransformerEncoderFusion": {"num_layers": 2},
        "TransformerDecoder": {"num_layers": 2},
        "TransformerEncoderCrossAttention": {"num_layers": 1},
    },
    TINY: {
        "ViT": {"embed_dim": 128, "num_heads": 2, "depth": 2, "global_att_blocks": (1,)},
        "VETextEncoder": {"width": 128, "heads": 2, "layers": 1},
        "SequenceGeometryEncoder": {"num_layers": 1},
        "TransformerEncoderFusion": {"num_layers": 1},
        "TransformerDecoder": {"num_layers": 1},
        "TransformerEncoderCrossAttention": {"num_layers": 1},
    },
}
"""Scale → class name in `sam3.model_builder` → constructor arguments that replace upstream's.

`tiny` alone changes widths: of the trunk and of the text encoder, inside which they stay.
"""


@contextmanager
def scaled(scale: str) -> Iterator[None]:
    """Replaces constructor arguments so that upstream's builder builds at a scale; to be entered inside `upstream()`.

    Raises:
        HarnessError: The scale is unknown.
    """
    if scale not in SCALES:
        raise HarnessError(f"Unknown scale {str(scale)!r}; choose one of {', '.join(SCALES)}.")
    import sam3.model_builder

    def overriding(original: Any, overrides: Mapping[str, Any]) -> Any:
        return lambda *args, **kwargs: original(*args, **{**kwargs, **overrides})

    with ExitStack() as stack:
        for name, overrides in SCALES[scale].items():
            constructor = overriding(getattr(sam3.model_builder, name), overrides)
            stack.enter_context(replaced(sam3.model_builder, name, constructor))
        yield
