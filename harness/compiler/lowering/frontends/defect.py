"""Defines a defect of a frontend as plain data for the import, the tests and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import onnx_ir

TESTED_VERSION = "0.27.0.post1"
"""The apache-tvm release that has the defects."""

Converter = Callable[..., Any]
"""Makes a Relax expression of a call, as TVM's own converters do.

In the frontend `torch` it takes the fx node and the importer (the signature of `custom_convert_map`); in `onnx`, the
block builder, the node's inputs (None if omitted) and its attributes.
"""

GraphPass = Callable[[torch.fx.GraphModule], None]
"""Rewrites an exported program's graph in place; every new node carries `meta["val"]`."""


class Symptom(StrEnum):
    """The symptom of a defect."""

    REJECTED = "rejected"
    WRONG_RESULT = "wrong result"
    SLOW = "not optimized"


@dataclass(frozen=True)
class RawOutcome:
    """The result of the reproduction in an unmodified frontend.

    Attributes:
        symptom: The symptom.
        error: Name of the exception's type; empty where no error is raised.
        message: Regular expression found in the exception's message.
        wrong: The wrong result as text, if no error is raised.
        absent: Text that is missing in the printed form of a module that could be better.
    """

    symptom: Symptom
    error: str = ""
    message: str = ""
    wrong: str = ""
    absent: str = ""


@dataclass(frozen=True)
class Defect:
    """One defect of a frontend, and its workaround.

    Attributes:
        name: Identifier, also the test id.
        title: One line.
        location: The faulty function.
        description: The fault and its cause, in a few sentences.
        function: The smallest function that shows it.
        args: The function's arguments.
        raw: The result of the unmodified frontend.
        workaround: The workaround, in a sentence or two.
        converters: Importer functions that replace TVM's, by the importer's operator name.
        passes: Rewrites of the exported program before the import, in `onnx` before PyTorch's ONNX exporter.
        translations: In `onnx`, functions that replace translations of PyTorch's exporter, by PyTorch's operator: they
            take the operator's arguments as ONNX values (`custom_translation_table`).
        model_passes: In `onnx`, rewrites of the ONNX model before the import.
    """

    name: str
    title: str
    location: str
    description: str
    function: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    raw: RawOutcome
    workaround: str
    converters: Mapping[str, Converter] = field(default_factory=dict)
    passes: tuple[GraphPass, ...] = ()
    translations: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    model_passes: tuple[Callable[[onnx_ir.Model], None], ...] = ()

    def reproduction(self) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        """Returns the smallest module and inputs that show the defect."""
        module = torch.nn.Module()
        module.forward = self.function
        return module, self.args


def normal(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Draws tensors of these shapes from the normal distribution, the same ones in every process."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)
