"""Defines an entry point, and the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.core.program import Program, Symbolic
from harness.runtime.sam3.description import Capacity

if TYPE_CHECKING:
    import torch

VOCABULARY = 49408
"""Number of distinct tokens (`vocab_size` of upstream's VETextEncoder)."""
TEXT_TOKENS = 32
"""Length of a tokenized text (`context_length` of upstream's VETextEncoder)."""
FEATURE_SIZES = (288, 144, 72)
"""Height and width of the feature maps that grounding reads."""
CHANNELS = 256
QUERIES_AT_ONCE = 16
"""Queries whose masks one call predicts: the number of rows of one step of most matrix units."""
CORNERS_AND_PAD = 3
"""Places of a box's two corners, and of the padding point that upstream adds to every prompt with points or a box."""
MEMORY_CHANNELS = 64
MEMORIES = 10
"""The largest number of memories that upstream's rules give a frame."""
RANKS = 7
"""Number of temporal positions of memories (`num_maskmem` of upstream's tracker)."""
LABELS = 2
"""Number of labels of points and boxes: negative and positive."""


@dataclass(frozen=True)
class EntryPoint:
    """A function of the compiled model.

    Attributes:
        name: Name in the library.
        outputs: Names of its results, in order.
        build: Takes upstream's image model and returns the module, which maps tensors to a tuple of tensors.
        inputs: Takes that model and the capacity, and returns inputs by name to export the module with; only shapes and
            dtypes matter.
        uses_rope: Whether the module has rotary position encoding.
        symbolic: Axes of inputs whose extents are not fixed when the model is compiled.
        build_composed: Builds the module for targets that would materialize an upsampled image to convolve it; None for
            the same module.
        below: Exclusive upper bound of the values of index inputs, by name; the lower bound is 0.
    """

    name: str
    outputs: tuple[str, ...]
    build: Callable[[Any], torch.nn.Module]
    inputs: Callable[[Any, Capacity], dict[str, torch.Tensor]]
    uses_rope: bool = False
    symbolic: Symbolic = field(default_factory=dict)
    build_composed: Callable[[Any], torch.nn.Module] | None = None
    below: Mapping[str, int] = field(default_factory=dict)

    def program(self, model: Any, capacity: Capacity, upsampling: bool) -> Program:
        """Returns the entry point of upstream's image model.

        Args:
            model: The model.
            capacity: Capacity of prompts.
            upsampling: Whether the target convolves an upsampled image without materializing it.
        """
        build = self.build if upsampling or self.build_composed is None else self.build_composed
        module = build(model).eval()
        inputs = self.inputs(model, capacity)
        return Program(self.name, module, inputs, self.outputs, self.uses_rope, self.symbolic, self.below)
