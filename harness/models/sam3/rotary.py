"""Defines the rotary attentions of SAM 3 whose rotation a strategy replaces: the trunk's and the tracker's.

Classes are identified by name, because importing sam3 needs patches on some machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.rotation import RotaryAttention, Rotation, Tables

if TYPE_CHECKING:
    import torch


def _trunk_apply_rope(rotation: Rotation, tables: Callable[[], Tables], _positions: int) -> Any:
    """Returns a replacement of `sam3.model.vitdet.Attention._apply_rope`; q and k are [B, heads, L, D]."""

    def apply_rope(_self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotation.apply(q, k, tables(), 1)

    return apply_rope


def _tracker_forward(rotation: Rotation, tables: Callable[[], Tables], positions: int) -> Any:
    """Returns a replacement of `sam3.sam.transformer.RoPEAttention.forward` in evaluation mode.

    The last `num_k_exclude_rope` keys (object pointers) keep their phase; there may be several times as many other keys
    as queries.
    """

    def forward(
        self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_k_exclude_rope: int = 0
    ) -> torch.Tensor:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (
            self._separate_heads(project(tokens), self.num_heads)
            for project, tokens in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        rotation_tables = tables()
        if positions != q.shape[-2]:
            side = round(q.shape[-2] ** 0.5)  # upstream takes the queries as a square here
            options = self.compute_cis.keywords
            computed = rotation.compute(options["dim"], side, side, options["theta"])
            rotation_tables = tuple(table.to(device=q.device) for table in computed)
        rotated_keys = k.shape[-2] - num_k_exclude_rope
        repeat = max(rotated_keys // q.shape[-2], 1) if self.rope_k_repeat else 1
        q, rotated = rotation.apply(q, k[:, :, :rotated_keys], rotation_tables, repeat)
        k = torch.cat((rotated, k[:, :, rotated_keys:]), dim=-2)
        return self.out_proj(self._recombine_heads(scaled_dot_product_attention(q, k, v)))  # type: ignore[no-any-return]

    return forward


TRUNK = RotaryAttention(("sam3.model.vitdet", "Attention"), "freqs_cis", "_apply_rope", _trunk_apply_rope)
TRACKER = RotaryAttention(("sam3.sam.transformer", "RoPEAttention"), "freqs_cis", "forward", _tracker_forward)
