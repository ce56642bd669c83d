"""Lifts assumptions about connected components of masks: scikit-image is installed, and there is a mask."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from harness.models.sam3.patches.patch import patch, replaced, source, wrapped

if TYPE_CHECKING:
    import torch


@patch(needed=lambda: find_spec("skimage") is None and "skimage" in source("perflib/connected_components.py"))
def holes_are_filled() -> AbstractContextManager[None]:
    """Finds components with PyTorch.

    Assumption: scikit-image is installed, which finds connected components on the CPU
    (sam3/perflib/connected_components.py, connected_components_cpu_single).
    Without the patch: without it masks of clicks silently keep their holes, and the tracking of a video fails.
    """
    import sam3.perflib.connected_components
    import torch

    def components(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns labels and areas of the 8-connected components of [height, width], 0 outside of them.

        Every pixel begins as its own tree. Each round hooks a tree onto the largest root that it touches, and then
        shortens the paths to the roots, as in the algorithm of Shiloach and Vishkin (1982).
        """
        inside = torch.nn.functional.pad((values != 0).flatten(), (1, 0))
        roots = torch.arange(len(inside)) * inside
        while True:
            largest = torch.nn.functional.max_pool2d(roots[1:].view(1, *values.shape).double(), 3, stride=1, padding=1)
            touched = torch.nn.functional.pad(largest.long().flatten(), (1, 0)) * inside
            if torch.equal(touched, roots):
                break
            roots = roots.scatter_reduce(0, roots, touched, "amax")
            for _ in range(4):
                roots = roots[roots]
        areas = torch.bincount(roots, minlength=len(roots))[roots] * inside
        return roots[1:].view(values.shape), areas[1:].view(values.shape)

    return replaced(sam3.perflib.connected_components, "connected_components_cpu_single", components)


@patch(needed=lambda: "torch.stack(labels_list" in source("perflib/connected_components.py"))
def no_masks_have_no_components() -> AbstractContextManager[None]:
    """Returns no labels and no areas of no masks.

    Assumption: there is at least one mask whose connected components are wanted on the CPU
    (sam3/perflib/connected_components.py, connected_components_cpu).
    Without the patch: torch.stack of nothing fails on every frame of a video on which no object is found.
    """
    import sam3.perflib.connected_components
    import torch

    def components(original: Callable[..., Any], masks: torch.Tensor) -> Any:
        return original(masks) if len(masks) else (torch.zeros_like(masks, dtype=torch.int64),) * 2

    return wrapped(sam3.perflib.connected_components, "connected_components_cpu", components)
