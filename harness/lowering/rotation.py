"""How strategies replace the rotation inside a model's attention modules: complex table out, tables of their own in."""

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
        """Rotates queries [B, heads, L, D] and keys [B, heads, repeat·L, D]."""
        if self.together is not None:
            return self.together(q, k, tables, repeat)
        return self.rotate(q, tables, 1), self.rotate(k, tables, repeat)


@dataclass(frozen=True)
class RotaryAttention:
    """A class of attention modules that rotate queries and keys by a complex table.

    Attributes:
        cls: Module and qualified name of the class; naming it imports nothing.
        table: The attribute or buffer with the complex table [L, D/2].
        method: The method that is replaced.
        replacement: Makes what stands in for the method of a rotation, the way to its tables, and the length of the
            complex table.
    """

    cls: tuple[str, str]
    table: str
    method: str
    replacement: Callable[[Rotation, Callable[[], Tables], int], Any]

    def describes(self, module: torch.nn.Module) -> bool:
        """Returns whether a module is of the class and has its table."""
        named = any((base.__module__, base.__qualname__) == self.cls for base in type(module).__mro__)
        return named and getattr(module, self.table, None) is not None


_KNOWN: list[RotaryAttention] = []


def register_rotary_attention(*kinds: RotaryAttention) -> None:
    """Lets strategies find the rotary attention of a model; the package of the model calls it."""
    _KNOWN.extend(kind for kind in kinds if kind not in _KNOWN)


def rotating(module: torch.nn.Module, rotation: Rotation) -> AbstractContextManager[None]:
    """Lets every RoPE attention in `module` use a rotation for the duration of the context.

    No complex table is then left among the buffers: torch.export sees the rotation's tables instead.
    Only instances change, and each is as it was afterwards, whatever happens inside.
    """
    return _rotating(module, rotation)


@contextmanager
def _rotating(module: torch.nn.Module, rotation: Rotation) -> Iterator[None]:
    with ExitStack() as stack:
        for part in module.modules():
            kind = next((kind for kind in _KNOWN if kind.describes(part)), None)
            if kind is not None:
                stack.enter_context(_replaced(part, kind, rotation))
        yield


@contextmanager
def _replaced(module: torch.nn.Module, kind: RotaryAttention, rotation: Rotation) -> Iterator[None]:
    """Replaces the complex table of one attention by buffers, and the method that reads it."""
    buffers = list(module._buffers)
    persistent = kind.table in buffers and kind.table not in module._non_persistent_buffers_set
    table = getattr(module, kind.table)
    tables = rotation.convert(table)
    delattr(module, kind.table)
    for name, value in tables.items():
        module.register_buffer(name, value, persistent=persistent)
    # read back from the module, whose buffers torch.export replaces by its own
    replacement = kind.replacement(rotation, lambda: {name: getattr(module, name) for name in tables}, len(table))
    object.__setattr__(module, kind.method, MethodType(replacement, module))
    try:
        yield
    finally:
        delattr(module, kind.method)
        for name in tables:
            delattr(module, name)
        if kind.table in buffers:
            module.register_buffer(kind.table, table, persistent=persistent)
            # state_dict lists buffers in the order of registration
            for name in buffers[buffers.index(kind.table) + 1 :]:
                module._buffers[name] = module._buffers.pop(name)
        else:
            setattr(module, kind.table, table)
