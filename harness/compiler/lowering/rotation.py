"""Replaces the rotation in a model's attention modules: a complex table by the tables of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Tables = tuple["torch.Tensor", ...]
"""The tensors of a rotation."""
RotateBoth = Callable[["torch.Tensor", "torch.Tensor", Tables, int], tuple["torch.Tensor", "torch.Tensor"]]
"""Takes queries, keys, the tables, and the number of their repetitions along the keys; returns both rotated."""


@dataclass(frozen=True)
class Rotation:
    """One form of RoPE, without complex numbers.

    Attributes:
        names: Names of the tables' buffers.
        convert: Makes the tables from upstream's complex table [L, D/2] of e^(i·angle).
        compute: Makes the tables of a grid from the head size D, width, height and theta; traced by torch.export.
        rotate: Takes queries or keys [B, heads, repeat·L, D], each of the tables, and `repeat`, the number of their
            repetitions along the tokens; returns the rotated tensor in the input's dtype.
        rotate_both: Rotates queries and keys in one operator; by default `rotate` rotates each.
    """

    names: tuple[str, ...]
    convert: Callable[[torch.Tensor], Tables]
    compute: Callable[[int, int, int, float], Tables]
    rotate: Callable[..., torch.Tensor]
    rotate_both: RotateBoth | None = None

    def apply(self, q: torch.Tensor, k: torch.Tensor, tables: Tables, repeat: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries [B, heads, L, D] and keys [B, heads, repeat·L, D]."""
        if self.rotate_both is not None:
            return self.rotate_both(q, k, tables, repeat)
        return self.rotate(q, *tables, 1), self.rotate(k, *tables, repeat)


@dataclass(frozen=True)
class RotaryAttention:
    """A class of attention modules that rotate queries and keys by a complex table.

    Attributes:
        cls: Module and qualified name of the class, which are given without an import.
        table: The attribute or buffer with the complex table [L, D/2].
        method: The replaced method.
        replacement: Makes the replacement of the method from a rotation, a function that returns its tables, and the
            length of the complex table.
    """

    cls: tuple[str, str]
    table: str
    method: str
    replacement: Callable[[Rotation, Callable[[], Tables], int], Any]

    def describes(self, module: torch.nn.Module) -> bool:
        """Returns whether a module is of the class and has its table."""
        is_instance = any((base.__module__, base.__qualname__) == self.cls for base in type(module).__mro__)
        return is_instance and getattr(module, self.table, None) is not None


_REGISTERED: list[RotaryAttention] = []


def register_rotary_attention(*kinds: RotaryAttention) -> None:
    """Registers the rotary attention of a model for all strategies; the package of the model calls it."""
    _REGISTERED.extend(kind for kind in kinds if kind not in _REGISTERED)


@contextmanager
def use_rotation(module: torch.nn.Module, rotation: Rotation) -> Iterator[None]:
    """Lets every RoPE attention in `module` use a rotation for the duration of the context.

    No complex table remains among the buffers, and torch.export sees the rotation's tables instead. Only instances
    change, and they are restored afterwards, also after an exception.
    """
    with ExitStack() as stack:
        for part in module.modules():
            kind = next((kind for kind in _REGISTERED if kind.describes(part)), None)
            if kind is not None:
                stack.enter_context(_replace_rotation(part, kind, rotation))
        yield


@contextmanager
def _replace_rotation(module: torch.nn.Module, kind: RotaryAttention, rotation: Rotation) -> Iterator[None]:
    """Replaces the complex table of one attention by buffers, and the method that reads it."""
    buffers = list(module._buffers)
    persistent = kind.table in buffers and kind.table not in module._non_persistent_buffers_set
    table = getattr(module, kind.table)
    tables = rotation.convert(table)
    delattr(module, kind.table)
    for name, value in zip(rotation.names, tables, strict=True):
        module.register_buffer(name, value, persistent=persistent)
    # read back from the module, whose buffers torch.export replaces by its own
    replacement = kind.replacement(
        rotation, lambda: tuple(getattr(module, name) for name in rotation.names), len(table)
    )
    object.__setattr__(module, kind.method, MethodType(replacement, module))
    try:
        yield
    finally:
        delattr(module, kind.method)
        for name in rotation.names:
            delattr(module, name)
        if kind.table in buffers:
            module.register_buffer(kind.table, table, persistent=persistent)
            # state_dict lists buffers in the order of registration
            for name in buffers[buffers.index(kind.table) + 1 :]:
                module._buffers[name] = module._buffers.pop(name)
        else:
            setattr(module, kind.table, table)
