"""Lifts hard-coded CUDA: tensors made on "cuda", `autocast("cuda")`, `pin_memory()` and `Tensor.cuda()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

from harness.models.sam3.patches.patch import Patch, replaced, source


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it reads `device="cuda"` as `device="cpu"`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


@contextmanager
def _position_encoding_not_precomputed() -> Iterator[None]:
    from sam3.model.position_encoding import PositionEmbeddingSine

    original = PositionEmbeddingSine.__init__

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "precompute_resolution": None})

    with replaced(PositionEmbeddingSine, "__init__", build):
        yield


@contextmanager
def _decoder_coordinates_on_cpu() -> Iterator[None]:
    from sam3.model.decoder import TransformerDecoder

    with replaced(TransformerDecoder, "_get_coords", staticmethod(_on_cpu(TransformerDecoder._get_coords))):
        yield


@contextmanager
def _decoder_without_autocast() -> Iterator[None]:
    from sam3.model.decoder import TransformerDecoderLayer

    def forward_ffn(self: Any, tgt: Any) -> Any:
        hidden = self.linear2(self.dropout3(self.activation(self.linear1(tgt))))
        return self.norm3(tgt + self.dropout4(hidden))

    with replaced(TransformerDecoderLayer, "forward_ffn", forward_ffn):
        yield


@contextmanager
def _tracker_without_autocast() -> Iterator[None]:
    import torch
    from sam3.model.sam3_tracking_predictor import Sam3TrackerPredictor

    original = Sam3TrackerPredictor.__init__

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        with replaced(torch, "autocast", lambda *_, **__: nullcontext()):
            original(self, *args, **kwargs)

    with replaced(Sam3TrackerPredictor, "__init__", build):
        yield


@contextmanager
def _pin_memory_does_nothing() -> Iterator[None]:
    import torch

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self

    with replaced(torch.Tensor, "pin_memory", pin_memory):
        yield


@contextmanager
def _cuda_stays_on_cpu() -> Iterator[None]:
    import torch

    def cuda(self: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self

    with replaced(torch.Tensor, "cuda", cuda):
        yield


@contextmanager
def _rotary_tables_on_cpu() -> Iterator[None]:
    import torch
    from sam3.sam.transformer import RoPEAttention

    original = RoPEAttention.__init__

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        with replaced(torch.cuda, "is_available", lambda: False):
            original(self, *args, **kwargs)

    with replaced(RoPEAttention, "__init__", build):
        yield


@contextmanager
def _tracker_state_on_cpu() -> Iterator[None]:
    from sam3.model.sam3_tracking_predictor import Sam3TrackerPredictor

    original = Sam3TrackerPredictor.init_state

    @wraps(original)
    def init_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **{**kwargs, "offload_state_to_cpu": True})

    with replaced(Sam3TrackerPredictor, "init_state", init_state):
        yield


POSITION_ENCODING_NOT_PRECOMPUTED = Patch(
    name="position_encoding_not_precomputed",
    assumption='position encodings are precomputed on "cuda", for sizes that SAM 3 never has',
    location="sam3/model/position_encoding.py, PositionEmbeddingSine.__init__",
    reason="building fails without CUDA, and mixes devices with it",
    needed=lambda: 'device="cuda"' in source("model/position_encoding.py"),
    apply=_position_encoding_not_precomputed,
)

DECODER_COORDINATES_ON_CPU = Patch(
    name="decoder_coordinates_on_cpu",
    assumption='the coordinates of the box position bias are made on "cuda"',
    location="sam3/model/decoder.py, TransformerDecoder.__init__",
    reason="building fails without CUDA, and mixes devices with it",
    needed=lambda: 'device="cuda"' in source("model/decoder.py"),
    apply=_decoder_coordinates_on_cpu,
)

DECODER_WITHOUT_AUTOCAST = Patch(
    name="decoder_without_autocast",
    assumption='the feed-forward layer runs inside a disabled autocast("cuda")',
    location="sam3/model/decoder.py, TransformerDecoderLayer.forward_ffn",
    reason="warns without CUDA, and puts an autocast region into the exported program; fp32 on the CPU needs neither",
    needed=lambda: "torch.amp.autocast" in source("model/decoder.py"),
    apply=_decoder_without_autocast,
)

TRACKER_WITHOUT_AUTOCAST = Patch(
    name="tracker_without_autocast",
    assumption='the tracker enters autocast("cuda", bfloat16) when it is built and never leaves it',
    location="sam3/model/sam3_tracking_predictor.py, Sam3TrackerPredictor.__init__",
    reason="warns without CUDA, and lets everything that runs on CUDA afterwards compute in bfloat16",
    needed=lambda: "bf16_context.__enter__" in source("model/sam3_tracking_predictor.py"),
    apply=_tracker_without_autocast,
)

PIN_MEMORY_DOES_NOTHING = Patch(
    name="pin_memory_does_nothing",
    assumption="the image size is copied through pinned memory",
    location="sam3/model/geometry_encoders.py, SequenceGeometryEncoder._encode_boxes",
    reason="fails without CUDA, and is an operator of its own in the exported program",
    needed=lambda: "pin_memory()" in source("model/geometry_encoders.py"),
    apply=_pin_memory_does_nothing,
)

CUDA_STAYS_ON_CPU = Patch(
    name="cuda_stays_on_cpu",
    assumption="memories and masks are moved with Tensor.cuda()",
    location="sam3/model/sam3_tracker_base.py and sam3_tracking_predictor.py",
    reason="fails without CUDA, and mixes devices with it",
    needed=lambda: ".cuda(" in source("model/sam3_tracker_base.py"),
    apply=_cuda_stays_on_cpu,
)

ROTARY_TABLES_ON_CPU = Patch(
    name="rotary_tables_on_cpu",
    assumption="the tracker's tables of rotary encoding are made on CUDA wherever there is one",
    location="sam3/sam/transformer.py, RoPEAttention.__init__",
    reason="mixes devices, because no attribute but parameters and buffers moves with a module",
    needed=lambda: 'torch.device("cuda") if torch.cuda.is_available()' in source("sam/transformer.py"),
    apply=_rotary_tables_on_cpu,
)

TRACKER_STATE_ON_CPU = Patch(
    name="tracker_state_on_cpu",
    assumption='masks and memories are stored on "cuda" unless their user asks for the CPU',
    location="sam3/model/sam3_tracking_predictor.py, Sam3TrackerPredictor.init_state",
    reason="fails without CUDA, and mixes devices with it",
    needed=lambda: (
        'inference_state["storage_device"] = torch.device("cuda")' in source("model/sam3_tracking_predictor.py")
    ),
    apply=_tracker_state_on_cpu,
)
