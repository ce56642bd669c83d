"""Strategy `real`: RoPE as explicit cos/sin arithmetic on pairs instead of complex64 multiplication.

Upstream views the head's D features as D/2 complex numbers and multiplies them by e^(i·angle) (RoFormer,
arXiv:2104.09864, in the interleaved pairing of GPT-J; axial as in arXiv:2403.13298). This is the same product written
out: (re + i·im)(cos + i·sin) = (re·cos − im·sin) + i·(re·sin + im·cos).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

from harness.rope.strategy import Strategy

if TYPE_CHECKING:
    import torch

# Classes are told by name, because naming them must not import sam3 (it needs patches to be importable on some
# machines).
_TRUNK_ATTENTION = ("sam3.model.vitdet", "Attention")
_TRACKER_ATTENTION = ("sam3.sam.transformer", "RoPEAttention")

_COMPLEX = "freqs_cis"
_COS, _SIN = "rope_cos", "rope_sin"


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    """Rotates each pair of neighbouring features of every token by its angle.

    Computed in float32, as upstream does, and in float64 for float64 inputs; returned in the dtype of `x`.

    Args:
        x: Queries or keys, [..., repeat·L, D] in any floating dtype, D even; L·repeat = 0 is returned as it is.
        cos: Cosines of the angles, [L, D/2].
        sin: Sines of the angles, [L, D/2].
        repeat: How many times the table is used along the tokens (keys of several memory frames).

    Returns:
        The rotated tensor, shape and dtype of `x`.

    Raises:
        ValueError: The tokens are not `repeat` times the table, or the features not twice its width.
    """
    import torch

    tokens, features = x.shape[-2:]
    if tokens == 0:
        return x
    if tokens != repeat * cos.shape[0] or features != 2 * cos.shape[1]:
        raise ValueError(
            f"RoPE table of {cos.shape[0]} positions x {cos.shape[1]} pairs, repeated {repeat} times, "
            f"does not fit {tokens} tokens of {features} features"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(dtype), sin.to(dtype)
    pairs = x.to(dtype).reshape(*x.shape[:-2], repeat, cos.shape[0], cos.shape[1], 2)
    re, im = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1)
    return rotated.reshape(x.shape).to(x.dtype)


def axial_tables(
    head_size: int,
    width: int,
    height: int,
    theta: float = 10000.0,
    scale: float = 1.0,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of two-dimensional axial RoPE, without complex numbers.

    Pair j of the first half of a head turns by x·theta^(−4j/D), pair j of the second half by y·theta^(−4j/D), where
    token t stands at x = (t mod width)·scale + offset, y = (t div width)·scale + offset.

    Args:
        head_size: D, divisible by 4.
        width: Positions along x.
        height: Positions along y.
        theta: Base of the frequencies.
        scale: Factor on the positions (24/72 in the ViT's global blocks).
        offset: Added to the scaled positions.
        dtype: Dtype of computation and result; float32 by default, as upstream.

    Returns:
        Cosines and sines, each [width·height, D/2].
    """
    import torch

    dtype = dtype or torch.float32
    frequencies = 1.0 / (theta ** (torch.arange(0, head_size, 4, dtype=dtype) / head_size))
    token = torch.arange(width * height)
    x = (token % width).to(dtype) * scale + offset
    y = (token // width).to(dtype) * scale + offset
    angles = torch.cat((torch.outer(x, frequencies), torch.outer(y, frequencies)), dim=-1)
    return angles.cos(), angles.sin()


def real_tables(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a complex table e^(i·angle) [L, D/2] into contiguous cosines and sines, each [L, D/2]."""
    return table.real.clone(), table.imag.clone()


def apply_real(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Lets every RoPE attention in `module` compute with real numbers for the duration of the context.

    No complex tensor is then left among the buffers: torch.export sees `rope_cos` and `rope_sin` instead of
    `freqs_cis`. Only instances change, and each is as it was afterwards, whatever happens inside.
    """
    return _apply_real(module)


@contextmanager
def _apply_real(module: torch.nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for part in module.modules():
            if _is_a(part, _TRUNK_ATTENTION) and getattr(part, _COMPLEX, None) is not None:
                stack.enter_context(_real_tables_in(part, "_apply_rope", _trunk_apply_rope))
            elif _is_a(part, _TRACKER_ATTENTION) and getattr(part, _COMPLEX, None) is not None:
                stack.enter_context(_real_tables_in(part, "forward", _tracker_forward))
        yield


REAL = Strategy(
    name="real",
    summary="explicit cos/sin arithmetic on pairs of features, in float32",
    apply=apply_real,
)


def _is_a(module: torch.nn.Module, name: tuple[str, str]) -> bool:
    return any((base.__module__, base.__qualname__) == name for base in type(module).__mro__)


@contextmanager
def _real_tables_in(module: torch.nn.Module, method: str, replacement: Any) -> Iterator[None]:
    """Replaces the complex table of one attention by buffers of cosines and sines, and the method that reads it."""
    buffers = list(module._buffers)
    persistent = _COMPLEX in buffers and _COMPLEX not in module._non_persistent_buffers_set
    table = getattr(module, _COMPLEX)
    delattr(module, _COMPLEX)
    cos, sin = real_tables(table)
    module.register_buffer(_COS, cos, persistent=persistent)
    module.register_buffer(_SIN, sin, persistent=persistent)
    object.__setattr__(module, method, MethodType(replacement, module))
    try:
        yield
    finally:
        delattr(module, method)
        delattr(module, _COS)
        delattr(module, _SIN)
        if _COMPLEX in buffers:
            module.register_buffer(_COMPLEX, table, persistent=persistent)
            for name in buffers[buffers.index(_COMPLEX) + 1 :]:  # state_dict lists buffers in the order of registration
                module._buffers[name] = module._buffers.pop(name)
        else:
            setattr(module, _COMPLEX, table)


def _trunk_apply_rope(self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for `sam3.model.vitdet.Attention._apply_rope`; q and k are [B, heads, L, D]."""
    return rotate(q, self.rope_cos, self.rope_sin), rotate(k, self.rope_cos, self.rope_sin)


def _tracker_forward(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_k_exclude_rope: int = 0
) -> torch.Tensor:
    """Stands in for `sam3.sam.transformer.RoPEAttention.forward`, in evaluation mode.

    The last `num_k_exclude_rope` keys (object pointers) keep their phase; the others may be several times the queries.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (
        self._separate_heads(project(tokens), self.num_heads)
        for project, tokens in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
    )
    cos, sin = self.rope_cos, self.rope_sin
    if cos.shape[0] != q.shape[-2]:
        side = round(q.shape[-2] ** 0.5)  # upstream takes the queries as a square here
        options = self.compute_cis.keywords
        cos, sin = (
            table.to(device=q.device) for table in axial_tables(options["dim"], side, side, theta=options["theta"])
        )
    rotated_keys = k.shape[-2] - num_k_exclude_rope
    repeat = max(rotated_keys // q.shape[-2], 1) if self.rope_k_repeat else 1
    q = rotate(q, cos, sin)
    rotated = rotate(k[:, :, :rotated_keys], cos, sin, repeat)
    k = torch.cat((rotated, k[:, :, rotated_keys:]), dim=-2)
    return self.out_proj(self._recombine_heads(scaled_dot_product_attention(q, k, v)))  # type: ignore[no-any-return]
