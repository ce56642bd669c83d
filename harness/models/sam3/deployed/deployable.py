"""Defines SAM 3 for deployment: entry points, functions on images, and the tokenizer's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.compiler.deployment.deployable import Deployable, KernelFunction
from harness.core.case import WEIGHTS, Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.models.sam3.deployed.options import Sam3Options
from harness.runtime.sam3 import VOCABULARY_FILE
from harness.runtime.sam3.description import NAME

if TYPE_CHECKING:
    import tvm

_CPU = "cpu"
"""Key of TVM's targets for CPUs, which run loops in the order in which they are written."""


def _programs(case: Case, settings: Settings, options: Sam3Options) -> Iterator[Program]:
    from harness.models.sam3.deployed.entry_points import programs

    return programs(case, settings, options)


def _upstream() -> AbstractContextManager[None]:
    from harness.models.sam3.upstream import upstream

    return upstream()


def _files() -> Mapping[str, Path]:
    from harness.models.sam3.vocabulary import vocabulary_path

    return {VOCABULARY_FILE: vocabulary_path()}


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

DEPLOYABLE = Deployable(
    model=NAME,
    programs=_programs,
    context=_upstream,
    kernels=(PREPROCESS, RESIZE_MASKS),
    files=_files,
    options=Sam3Options,
    weights=WEIGHTS,
)
"""The whole model, which `sam3-tvm compile` writes into a folder."""
