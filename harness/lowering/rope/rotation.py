"""How strategies replace the rotation inside SAM 3's attention modules: complex table out, tables of their own in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Tables = Mapping[str, "torch.Tensor"]
"""The tensors that a rotation needs, by the names under which they become buffers."""
Together = Callable[["torch.Tensor", "torch.Tensor", Tables, int], tuple["torch.Tensor", "torch.Tensor"]]
"""Takes queries, keys, the tables, and how many times they are used along the keys; returns both rotated."""

# Classes are told by name, because naming them must not import sam3 (it needs patches to be importable on some
# machines).
_TRUNK_ATTENTION = ("sam3.model.vitdet", "Attention")
_TRACKER_ATTENTION = ("sam3.sam.transformer", "RoPEAttention")

_COMPLEX = "freqs_cis"


@dataclass(frozen=True)
class Rotation:
    """One form of RoPE, without complex numbers.

    Attributes:
        convert: Makes the tables from upstream's complex one [L, D/2], which is e^(i·angle).
        compute: Makes the tables of a grid from the head size D, width, height and theta; traced by torch.export.
        rotate: Takes queries or keys [B, heads, repeat·L, D], the tables, and `repeat`, how many times the tables are
            used along the tokens; returns the rotated tensor in the dtype of the first.
        together: Rotates queries and keys at once; by default each is rotated by `rotate`.
    """

    convert: Callable[[torch.Tensor], Tables]
    compute: Callable[[int, int, int, float], Tables]
    rotate: Callable[[torch.Tensor, Tables, int], torch.Tensor]
    together: Together | None = None

    def both(self, q: torch.Tensor, k: torch.Tensor, tables: Tables, repeat: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, heads, L, D] and keys [B, heads, repeat·L, D], rotated."""
        if self.together is not None:
            return self.together(q, k, tables, repeat)
        return self.rotate(q, tables, 1), self.rotate(k, tables, repeat)


def rotating(module: torch.nn.Module, rotation: Rotation) -> AbstractContextManager[None]:
    """Lets every RoPE attention in `module` use a rotation for the duration of the context.

    No complex tensor is then left among the buffers: torch.export sees the rotation's tables instead of `freqs_cis`.
    Only instances change, and each is as it was afterwards, whatever happens inside.
    """
    return _rotating(module, rotation)


@contextmanager
def _rotating(module: torch.nn.Module, rotation: Rotation) -> Iterator[None]:
    with ExitStack() as stack:
        for part in module.modules():
            if _is_a(part, _TRUNK_ATTENTION) and getattr(part, _COMPLEX, None) is not None:
                stack.enter_context(_replaced(part, "_apply_rope", _trunk_apply_rope, rotation))
            elif _is_a(part, _TRACKER_ATTENTION) and getattr(part, _COMPLEX, None) is not None:
                stack.enter_context(_replaced(part, "forward", _tracker_forward, rotation))
        yield


def _is_a(module: torch.nn.Module, name: tuple[str, str]) -> bool:
    return any((base.__module__, base.__qualname__) == name for base in type(module).__mro__)


@contextmanager
def _replaced(
    module: torch.nn.Module, method: str, make: Callable[[Rotation, Callable[[], Tables], int], Any], rotation: Rotation
) -> Iterator[None]:
    """Replaces the complex table of one attention by buffers, and the method that reads it."""
    buffers = list(module._buffers)
    persistent = _COMPLEX in buffers and _COMPLEX not in module._non_persistent_buffers_set
    table = getattr(module, _COMPLEX)
    tables = rotation.convert(table)
    delattr(module, _COMPLEX)
    for name, value in tables.items():
        module.register_buffer(name, value, persistent=persistent)
    # read back from the module, whose buffers torch.export replaces by its own
    replacement = make(rotation, lambda: {name: getattr(module, name) for name in tables}, len(table))
    object.__setattr__(module, method, MethodType(replacement, module))
    try:
        yield
    finally:
        delattr(module, method)
        for name in tables:
            delattr(module, name)
        if _COMPLEX in buffers:
            module.register_buffer(_COMPLEX, table, persistent=persistent)
            for name in buffers[buffers.index(_COMPLEX) + 1 :]:  # state_dict lists buffers in the order of registration
                module._buffers[name] = module._buffers.pop(name)
        else:
            setattr(module, _COMPLEX, table)


def _trunk_apply_rope(rotation: Rotation, tables: Callable[[], Tables], _positions: int) -> Any:
    """Stands in for `sam3.model.vitdet.Attention._apply_rope`; q and k are [B, heads, L, D]."""

    def apply_rope(_self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotation.both(q, k, tables(), 1)

    return apply_rope


def _tracker_forward(rotation: Rotation, tables: Callable[[], Tables], positions: int) -> Any:
    """Stands in for `sam3.sam.transformer.RoPEAttention.forward`, in evaluation mode.

    The last `num_k_exclude_rope` keys (object pointers) keep their phase; the others may be several times the queries.
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
        chosen = tables()
        if positions != q.shape[-2]:
            side = round(q.shape[-2] ** 0.5)  # upstream takes the queries as a square here
            options = self.compute_cis.keywords
            computed = rotation.compute(options["dim"], side, side, options["theta"])
            chosen = {name: table.to(device=q.device) for name, table in computed.items()}
        rotated_keys = k.shape[-2] - num_k_exclude_rope
        repeat = max(rotated_keys // q.shape[-2], 1) if self.rope_k_repeat else 1
        q, rotated = rotation.both(q, k[:, :, :rotated_keys], chosen, repeat)
        k = torch.cat((rotated, k[:, :, rotated_keys:]), dim=-2)
        return self.out_proj(self._recombine_heads(scaled_dot_product_attention(q, k, v)))  # type: ignore[no-any-return]

    return forward
