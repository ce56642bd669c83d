"""Defines a component: one exportable part of SAM 3 with named inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.core.precision import PRECISIONS
from harness.core.program import Symbolic
from harness.models.sam3.captures import GROUNDING, Activations, Capture

if TYPE_CHECKING:
    import torch

EVERY_PRECISION = tuple(PRECISIONS)

Arguments = Mapping[str, "torch.Tensor"]
"""Inputs of one component by name, in the order of its forward."""


def single_sample(sample: str, *inputs: str) -> Callable[[Activations], Mapping[str, Arguments]]:
    """Returns a function that takes the named inputs of one sample from the captured activations."""
    return lambda activations: {sample: activations.take(*inputs)}


@dataclass(frozen=True)
class Component:
    """One exportable part of SAM 3.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        inputs: Names of the inputs, in the order of the module's forward.
        outputs: Names of the outputs, in the order in which the module returns them.
        uses_rope: Whether the component has rotary position encoding; if not, only the strategy `real` applies.
        captured_by: The run of upstream's model that captures the inputs.
        with_sam2_neck: Whether the model must be built with upstream's SAM 2 neck although the run does not need it.
        emulated: Precisions in which the GPU kernels take at most half a minute on a CPU
            (docs/evidence/log/2026-11-30-gpu-kernels.md).
        symbolic: Axes of inputs whose extents differ between samples. One program answers all samples that differ in
            these axes alone, where the target, the frontend and the strategy take symbolic axes.
        build: Takes the SAM 3 image model and returns the module, which maps tensors to a tuple of tensors.
        samples: Takes the captured activations, which `capture` of the run's module describes; returns the inputs by
            sample name. The component is compiled and judged for every sample; the first is the main one.
    """

    name: str
    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    build: Callable[[Any], torch.nn.Module]
    samples: Callable[[Activations], Mapping[str, Arguments]]
    uses_rope: bool = False
    captured_by: Capture = GROUNDING
    with_sam2_neck: bool = False
    emulated: tuple[str, ...] = ()
    symbolic: Symbolic = field(default_factory=dict)

    @property
    def interactive(self) -> bool:
        """Returns whether the model needs upstream's SAM 2 neck and tracker (`enable_inst_interactivity`)."""
        return self.with_sam2_neck or self.captured_by.interactive
