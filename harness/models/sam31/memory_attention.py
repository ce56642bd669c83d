"""Defines SAM 3.1's memory attention: the frame and the buckets of objects have projections of their own."""

from __future__ import annotations

from sam3.sam.rope import apply_rotary_enc, compute_axial_cis
from torch import Tensor, cat, nn, zeros_like
from torch.nn.functional import gelu, scaled_dot_product_attention

from harness.models.sam31.multiplex import CHANNELS

HEADS = 8
FEED_FORWARD = 2048
"""Width of the feed-forward networks."""
POSITION_SCALE = 0.1
"""Share of the position encoding that is added to the frame's features."""


class SimpleRoPEAttention(nn.Module):
    """Rotary attention without projections.

    Attributes:
        freqs_cis: Complex table [L, head size / 2] of a grid of L tokens; a formula, which checkpoints do not have.
    """

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.freqs_cis = compute_axial_cis(CHANNELS // HEADS, end_x=grid[1], end_y=grid[0])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, pointer_tokens: int = 0, present: Tensor | None = None
    ) -> Tensor:
        """Attends from q [B, L, C] to present k and v [B, r·L + pointer_tokens, C]; pointers keep their phase."""
        q, k, v = (tokens.unflatten(-1, (HEADS, -1)).transpose(1, 2) for tokens in (q, k, v))
        spatial = k.shape[-2] - pointer_tokens
        q, rotated = self.apply_rope(q, k[:, :, :spatial])
        k = cat((rotated, k[:, :, spatial:]), dim=-2)
        mask = None if present is None else present.view(1, 1, 1, -1)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def apply_rope(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates queries [B, heads, L, D] and keys [B, heads, r·L, D]."""
        rotated: tuple[Tensor, Tensor] = apply_rotary_enc(q, k, self.freqs_cis, repeat_freqs_k=True)
        return rotated


class DecoupledMemoryAttentionLayer(nn.Module):
    """A layer of self-attention, attention to memories, and a feed-forward network, each after a norm."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.self_attn_q_proj = nn.Linear(CHANNELS, CHANNELS)
        self.self_attn_k_proj = nn.Linear(CHANNELS, CHANNELS)
        self.self_attn_v_proj = nn.Linear(CHANNELS, CHANNELS)
        self.self_attn_out_proj = nn.Linear(CHANNELS, CHANNELS)
        self.cross_attn_q_proj = nn.Linear(CHANNELS, CHANNELS)
        self.cross_attn_k_proj = nn.Linear(CHANNELS, CHANNELS)
        self.cross_attn_v_proj = nn.Linear(CHANNELS, CHANNELS)
        self.cross_attn_out_proj = nn.Linear(CHANNELS, CHANNELS)
        self.image_cross_attn_q_proj = nn.Linear(CHANNELS, CHANNELS)
        self.image_cross_attn_k_proj = nn.Linear(CHANNELS, CHANNELS)
        self.self_attention_rope = SimpleRoPEAttention(grid)
        self.cross_attention_rope = SimpleRoPEAttention(grid)
        self.linear1 = nn.Linear(CHANNELS, FEED_FORWARD)
        self.linear2 = nn.Linear(FEED_FORWARD, CHANNELS)
        self.norm1 = nn.LayerNorm(CHANNELS)
        self.norm2 = nn.LayerNorm(CHANNELS)
        self.norm3 = nn.LayerNorm(CHANNELS)

    def forward(
        self,
        frame: Tensor,
        tokens: Tensor,
        memory_frames: Tensor,
        memories: Tensor,
        memory_positions: Tensor,
        pointer_tokens: int,
        present: Tensor | None,
    ) -> Tensor:
        """Updates tokens [B, L, C], whose shapes and other arguments are those of `DecoupledMemoryAttention`."""
        normed = self.norm1(tokens)
        attended = self.self_attention_rope(
            self.self_attn_q_proj(normed), self.self_attn_k_proj(normed), self.self_attn_v_proj(normed)
        )
        tokens = tokens + self.self_attn_out_proj(attended)
        q = self.image_cross_attn_q_proj(frame) + self.cross_attn_q_proj(self.norm2(tokens))
        k = self.image_cross_attn_k_proj(memory_frames) + self.cross_attn_k_proj(memories) + memory_positions
        attended = self.cross_attention_rope(q, k, self.cross_attn_v_proj(memories), pointer_tokens, present)
        tokens = tokens + self.cross_attn_out_proj(attended)
        changed: Tensor = tokens + self.linear2(gelu(self.linear1(self.norm3(tokens))))
        return changed


class DecoupledMemoryAttention(nn.Module):
    """The attention of a frame to memories and pointers of B buckets, which share the frames' features."""

    def __init__(self, layers: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoupledMemoryAttentionLayer(grid) for _ in range(layers))
        self.norm = nn.LayerNorm(CHANNELS)

    def forward(
        self,
        frame: Tensor,
        frame_positions: Tensor,
        memory_frames: Tensor,
        memory_positions: Tensor,
        memories: Tensor,
        pointers: Tensor,
        pointer_positions: Tensor,
        present: Tensor | None = None,
    ) -> Tensor:
        """Returns the conditioned frame of each bucket, [B, L, C].

        Args:
            frame: Features of the frame, [1, L, C].
            frame_positions: Their positions, [1, L, C].
            memory_frames: Features of the frames of M memories, [1, M·L, C].
            memory_positions: Their positions in the frame and in time, [1, M·L, C].
            memories: Memories of the buckets, [B, M·L, C].
            pointers: Object pointers of the buckets, [B, P, C].
            pointer_positions: Their positions in time, [1, P, C].
            present: The keys that are not padding, bool [M·L + P]; None where none is.
        """
        pointer_tokens = pointers.shape[1]
        tokens = (frame + POSITION_SCALE * frame_positions).expand(len(memories), -1, -1)
        memory_frames = cat((memory_frames, zeros_like(pointers[:1])), dim=1)  # pointers have no frame
        memories = cat((memories, pointers), dim=1)
        positions = cat((memory_positions, pointer_positions), dim=1)
        for layer in self.layers:
            tokens = layer(frame, tokens, memory_frames, memories, positions, pointer_tokens, present)
        normed: Tensor = self.norm(tokens)
        return normed
