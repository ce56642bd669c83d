"""Poisons output buffers before each call, so that a kernel that skips an element is caught.

Reused memory often still holds the right value, from an earlier call of the same program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm_ffi

_ALLOCATION = "vm.builtin.alloc_tensor"
"""The builtin that TVM's virtual machine calls for each output tensor, right before the function that writes it."""
_POISON = 0xFF
"""The byte of poisoned memory: a float of such bytes is NaN, an integer is -1."""


def poison(tensor: tvm_ffi.Tensor) -> None:
    """Fills a tensor on the CPU with bytes that no correct kernel leaves."""
    import torch
    from torch.utils.dlpack import from_dlpack

    from_dlpack(tensor).reshape(-1).view(torch.uint8).fill_(_POISON)


def poison_allocation(_function: Any, name: str, is_before_call: bool, result: Any, *_arguments: Any) -> None:
    """Poisons each tensor as it is allocated; an instrument of TVM's virtual machine on the CPU."""
    if name == _ALLOCATION and not is_before_call:
        poison(result)
