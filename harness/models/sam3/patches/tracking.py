"""Lifts silent dependencies of upstream's answers: a cast to bfloat16, and whether scikit-image is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from harness.models.sam3.patches.patch import Patch, replaced, source


class _WithoutBfloat16:
    """The module torch, whose dtype bfloat16 is float32."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, "float32" if name == "bfloat16" else name)


@contextmanager
def _features_stay_float32() -> Iterator[None]:
    import sam3.model.sam3_image

    with replaced(sam3.model.sam3_image, "torch", _WithoutBfloat16()):
        yield


@contextmanager
def _components_without_scikit_image() -> Iterator[None]:
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

    with replaced(sam3.perflib.connected_components, "connected_components_cpu_single", components):
        yield


@contextmanager
def _no_masks_have_no_components() -> Iterator[None]:
    import sam3.perflib.connected_components
    import torch

    original = sam3.perflib.connected_components.connected_components_cpu

    def components(masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(masks):
            labels_and_areas: tuple[torch.Tensor, torch.Tensor] = original(masks)
            return labels_and_areas
        return torch.zeros_like(masks, dtype=torch.int64), torch.zeros_like(masks, dtype=torch.int64)

    with replaced(sam3.perflib.connected_components, "connected_components_cpu", components):
        yield


FEATURES_STAY_FLOAT32 = Patch(
    name="features_stay_float32",
    assumption="SAM 2 features are cast to bfloat16 for other GPUs, even in float32 and without any",
    location="sam3/model/sam3_image.py, Sam3ImageOnVideoMultiGPU._build_multigpu_buffer_next_chunk",
    reason="the convolutions that read them are in float32, and refuse",
    needed=lambda: "x.to(torch.bfloat16)" in source("model/sam3_image.py"),
    apply=_features_stay_float32,
)

HOLES_ARE_FILLED = Patch(
    name="holes_are_filled",
    assumption="scikit-image is installed, which finds connected components on the CPU",
    location="sam3/perflib/connected_components.py, connected_components_cpu_single",
    reason="without it masks of clicks silently keep their holes, and the tracking of a video fails",
    needed=lambda: find_spec("skimage") is None and "skimage" in source("perflib/connected_components.py"),
    apply=_components_without_scikit_image,
)

NO_MASKS_HAVE_NO_COMPONENTS = Patch(
    name="no_masks_have_no_components",
    assumption="there is at least one mask whose connected components are wanted on the CPU",
    location="sam3/perflib/connected_components.py, connected_components_cpu",
    reason="torch.stack of nothing fails on every frame of a video on which no object is found",
    needed=lambda: "torch.stack(labels_list" in source("perflib/connected_components.py"),
    apply=_no_masks_have_no_components,
)
