"""What compiled code is to write is filled before it: an element that it leaves out must not be right by chance.

Memory that is used again often still holds the right value there: that of an earlier call of the same program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm_ffi

_ALLOCATION = "vm.builtin.alloc_tensor"
"""What TVM's virtual machine calls for each tensor that a compiled function is to write, right before the function."""
_BYTE = 0xFF
"""A float of such bytes is NaN, an integer is -1."""


def fill(tensor: tvm_ffi.Tensor) -> None:
    """Fills a tensor on the CPU with what no honest kernel leaves there."""
    import torch
    from torch.utils.dlpack import from_dlpack

    from_dlpack(tensor).reshape(-1).view(torch.uint8).fill_(_BYTE)


def fill_allocated(_function: Any, name: str, before: bool, result: Any, *_arguments: Any) -> None:
    """Fills each tensor as it is allocated; an instrument of TVM's virtual machine on the CPU."""
    if name == _ALLOCATION and not before:
        fill(result)
