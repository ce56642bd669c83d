"""Lifts hard-coded CUDA: its devices, `autocast`, `pin_memory()`, and arithmetic of fewer bits than float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from harness.models.sam3.patches.patch import patch, replaced, source, wrapped


def _import_sets_tf32() -> bool:
    import torch

    return torch.cuda.is_available()


@patch(needed=_import_sets_tf32)
@contextmanager
def keep_tf32() -> Iterator[None]:
    """Restores the process's setting.

    Assumption: importing the package may switch TensorFloat-32 on for the whole process (sam3/model_builder.py,
    _setup_tf32).
    Without the patch: a reference computed on the GPU afterwards would have 10 bits of mantissa.
    """
    import torch

    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@patch(needed=lambda: 'device="cuda"' in source("model/position_encoding.py"))
def position_encoding_not_precomputed() -> AbstractContextManager[None]:
    """Skips what is precomputed.

    Assumption: position encodings are precomputed on "cuda", for sizes that SAM 3 never has
    (sam3/model/position_encoding.py, PositionEmbeddingSine.__init__).
    Without the patch: building fails without CUDA, and mixes devices with it.
    """
    from sam3.model.position_encoding import PositionEmbeddingSine

    return _with_arguments(PositionEmbeddingSine, "__init__", precompute_resolution=None)


@patch(needed=lambda: 'device="cuda"' in source("model/decoder.py"))
def decoder_coordinates_on_cpu() -> AbstractContextManager[None]:
    """Reads `device="cuda"` as `device="cpu"`.

    Assumption: the coordinates of the box position bias are made on "cuda" (sam3/model/decoder.py,
    TransformerDecoder.__init__).
    Without the patch: building fails without CUDA, and mixes devices with it.
    """
    from sam3.model.decoder import TransformerDecoder

    coordinates = TransformerDecoder._get_coords

    def get_coords(height: int, width: int, device: Any) -> Any:
        return coordinates(height, width, device="cpu" if str(device) == "cuda" else device)

    return replaced(TransformerDecoder, "_get_coords", staticmethod(get_coords))


@patch(needed=lambda: "torch.amp.autocast" in source("model/decoder.py"))
def decoder_without_autocast() -> AbstractContextManager[None]:
    """Computes the layer outside of autocast.

    Assumption: the feed-forward layer runs inside a disabled autocast("cuda") (sam3/model/decoder.py,
    TransformerDecoderLayer.forward_ffn).
    Without the patch: warns without CUDA, and puts an autocast region into the exported program; fp32 on the CPU
    needs neither.
    """
    from sam3.model.decoder import TransformerDecoderLayer

    def forward_ffn(self: Any, tgt: Any) -> Any:
        hidden = self.linear2(self.dropout3(self.activation(self.linear1(tgt))))
        return self.norm3(tgt + self.dropout4(hidden))

    return replaced(TransformerDecoderLayer, "forward_ffn", forward_ffn)


@patch(needed=lambda: "bf16_context.__enter__" in source("model/sam3_tracking_predictor.py"))
def tracker_without_autocast() -> AbstractContextManager[None]:
    """Builds the tracker while autocast does nothing.

    Assumption: the tracker enters autocast("cuda", bfloat16) when it is built and never leaves it
    (sam3/model/sam3_tracking_predictor.py, Sam3TrackerPredictor.__init__).
    Without the patch: warns without CUDA, and lets everything that runs on CUDA afterwards compute in bfloat16.
    """
    import torch
    from sam3.model.sam3_tracking_predictor import Sam3TrackerPredictor

    def build(original: Any, *args: Any, **kwargs: Any) -> None:
        with replaced(torch, "autocast", lambda *_, **__: nullcontext()):
            original(*args, **kwargs)

    return wrapped(Sam3TrackerPredictor, "__init__", build)


@patch(needed=lambda: "pin_memory()" in source("model/geometry_encoders.py"))
def pin_memory_does_nothing() -> AbstractContextManager[None]:
    """Leaves a tensor where it is.

    Assumption: the image size is copied through pinned memory (sam3/model/geometry_encoders.py,
    SequenceGeometryEncoder._encode_boxes).
    Without the patch: fails without CUDA, and is an operator of its own in the exported program.
    """
    import torch

    return replaced(torch.Tensor, "pin_memory", lambda self, device=None: self)


@patch(needed=lambda: ".cuda(" in source("model/sam3_tracker_base.py"))
def cuda_stays_on_cpu() -> AbstractContextManager[None]:
    """Leaves a tensor where it is.

    Assumption: memories and masks are moved with Tensor.cuda() (sam3/model/sam3_tracker_base.py and
    sam3_tracking_predictor.py).
    Without the patch: fails without CUDA, and mixes devices with it.
    """
    import torch

    return replaced(torch.Tensor, "cuda", lambda self, *_, **__: self)


@patch(needed=lambda: 'torch.device("cuda") if torch.cuda.is_available()' in source("sam/transformer.py"))
def rotary_tables_on_cpu() -> AbstractContextManager[None]:
    """Builds the attention as if there were no CUDA.

    Assumption: the tracker's tables of rotary encoding are made on CUDA wherever there is one
    (sam3/sam/transformer.py, RoPEAttention.__init__).
    Without the patch: mixes devices, because no attribute but parameters and buffers moves with a module.
    """
    import torch
    from sam3.sam.transformer import RoPEAttention

    def build(original: Any, *args: Any, **kwargs: Any) -> None:
        with replaced(torch.cuda, "is_available", lambda: False):
            original(*args, **kwargs)

    return wrapped(RoPEAttention, "__init__", build)


@patch(
    needed=lambda: (
        'inference_state["storage_device"] = torch.device("cuda")' in source("model/sam3_tracking_predictor.py")
    )
)
def tracker_state_on_cpu() -> AbstractContextManager[None]:
    """Asks for the CPU.

    Assumption: masks and memories are stored on "cuda" unless their user asks for the CPU
    (sam3/model/sam3_tracking_predictor.py, Sam3TrackerPredictor.init_state).
    Without the patch: fails without CUDA, and mixes devices with it.
    """
    from sam3.model.sam3_tracking_predictor import Sam3TrackerPredictor

    return _with_arguments(Sam3TrackerPredictor, "init_state", offload_state_to_cpu=True)


@patch(needed=lambda: "torch.bfloat16" in source("perflib/fused.py"))
def trunk_stays_float32() -> AbstractContextManager[None]:
    """Computes the layer and its activation in the dtype of their input.

    Assumption: the trunk's feed-forward layers compute in bfloat16, whatever the model's dtype
    (sam3/model/vitdet.py, Mlp.forward).
    Without the patch: results have 8 bits of mantissa, and later layers of float32 refuse them.
    """
    import sam3.model.vitdet

    return replaced(sam3.model.vitdet, "addmm_act", lambda activation, linear, tokens: activation()(linear(tokens)))


@patch(needed=lambda: "x.to(torch.bfloat16)" in source("model/sam3_image.py"))
def features_stay_float32() -> AbstractContextManager[None]:
    """Gives the file a module torch whose dtype bfloat16 is float32.

    Assumption: SAM 2 features are cast to bfloat16 for other GPUs, even in float32 and without any
    (sam3/model/sam3_image.py, Sam3ImageOnVideoMultiGPU._build_multigpu_buffer_next_chunk).
    Without the patch: the convolutions that read them are in float32, and refuse.
    """
    import sam3.model.sam3_image

    class WithoutBfloat16:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, "float32" if name == "bfloat16" else name)

    return replaced(sam3.model.sam3_image, "torch", WithoutBfloat16())


def _with_arguments(owner: Any, name: str, **changed: Any) -> AbstractContextManager[None]:
    """Replaces keyword arguments of a method, whatever its callers give."""
    return wrapped(owner, name, lambda original, *args, **kwargs: original(*args, **{**kwargs, **changed}))
