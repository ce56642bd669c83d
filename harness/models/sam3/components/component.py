"""Defines a component: one exportable part of SAM 3 with named inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.core.precision import PRECISIONS
from harness.core.program import Symbolic
from harness.models.sam3.captures import GROUNDING, Capture

if TYPE_CHECKING:
    import torch

EVERY_PRECISION = tuple(PRECISIONS)

Arguments = Mapping[str, "torch.Tensor"]
"""Inputs of one component by name, in the order of its forward."""


def captured(sample: str, *inputs: str) -> Callable[[Any], dict[str, Arguments]]:
    """Returns a function that takes one sample's inputs, by name, from what a run captured."""

    def samples(activations: Any) -> dict[str, Arguments]:
        return {sample: {name: getattr(activations, name) for name in inputs}}

    return samples


@dataclass(frozen=True)
class Component:
    """One exportable part of SAM 3.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        inputs: Names of the inputs, in the order of the module's forward.
        outputs: Names of the outputs, in the order in which the module returns them.
        uses_rope: Whether rotary position encoding is inside; if not, only the strategy `real` makes sense.
        captured_by: The run of upstream's model that the inputs are taken from.
        with_sam2_neck: Whether the model must be built with upstream's SAM 2 neck although the run does without it.
        emulated: Precisions in which its GPU kernels take at most half a minute on a CPU; docs/GPU_KERNELS.md has the
            times.
        symbolic: Axes of inputs whose extents differ between samples; one program answers all samples that differ in
            them alone, where the target, the frontend and the strategy take symbolic axes.
        build: Takes the SAM 3 image model, returns the module: tensors in, tuple of tensors out.
        samples: Takes what the run captured (the `Activations` of its module), returns the inputs by sample name; every
            sample is compiled for and judged. The first is the main one.
    """

    name: str
    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    build: Callable[[Any], torch.nn.Module]
    samples: Callable[[Any], dict[str, Arguments]]
    uses_rope: bool = False
    captured_by: Capture = GROUNDING
    with_sam2_neck: bool = False
    emulated: tuple[str, ...] = ()
    symbolic: Symbolic = field(default_factory=dict)

    @property
    def interactive(self) -> bool:
        """Whether the model must be built with upstream's SAM 2 neck and tracker (`enable_inst_interactivity`)."""
        return self.with_sam2_neck or self.captured_by.interactive
