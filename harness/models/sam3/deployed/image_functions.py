"""Defines the functions of the compiled model that do not come from PyTorch: preprocessing and mask resizing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.compiler.deployment.deployable import KernelFunction

if TYPE_CHECKING:
    import tvm

_CPU = "cpu"
"""Key of TVM's targets for CPUs, which run loops in the order in which they are written."""


def _preprocess(target: tvm.target.Target) -> tvm.IRModule:
    from harness.models.sam3.deployed import data_parallel, preprocessing

    if _CPU in target.keys:
        return preprocessing.preprocess_module()
    return data_parallel.preprocess_module(str(target.kind.name))


def _resize_masks(target: tvm.target.Target) -> tvm.IRModule:
    from harness.models.sam3.deployed import data_parallel, mask_resizing

    if _CPU in target.keys:
        return mask_resizing.resize_masks_module()
    return data_parallel.resize_masks_module(str(target.kind.name))


PREPROCESS = KernelFunction("preprocess", ("pixels",), _preprocess)
"""image uint8 [h, w, 3] to pixels fp32 [1, 3, 1008, 1008], as `Sam3Processor` resizes and normalizes them."""

RESIZE_MASKS = KernelFunction("resize_masks", ("masks",), _resize_masks, below={"kept": "q"})
"""mask logits fp32 [1, q, 288, 288], kept int64 [k] and an image uint8 [h, w, 3] to masks bool [k, h, w]."""

IMAGE_FUNCTIONS = (PREPROCESS, RESIZE_MASKS)
