"""Defect: one thing that TVM's PyTorch frontend gets wrong, as plain data for the import, the tests and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Converter = Callable[[Any, Any], Any]
"""Takes the fx node and TVM's importer, returns the Relax expression (the signature of `custom_convert_map`)."""

GraphPass = Callable[["torch.fx.GraphModule"], None]
"""Rewrites the decomposed graph in place, before the import; every new node carries `meta["val"]`."""

Reproduction = Callable[[], "tuple[torch.nn.Module, tuple[torch.Tensor, ...]]"]
"""Returns a module and its inputs, the smallest that shows the defect."""

TESTED_VERSION = "0.27.0.post1"
"""The apache-tvm release that the defects were seen in."""


class Symptom(StrEnum):
    """How a defect shows."""

    REJECTED = "rejected"
    WRONG_RESULT = "wrong result"
    SLOW = "not optimized"


@dataclass(frozen=True)
class RawOutcome:
    """What unmodified TVM does with the reproduction.

    Attributes:
        symptom: How it shows.
        error: Name of the exception's type; empty where no error is raised.
        message: Regular expression found in the exception's message.
        wrong: Where no error is raised, what is wrong, in words.
        absent: For a module that could be better, the text that is missing in its printed form.
    """

    symptom: Symptom
    error: str = ""
    message: str = ""
    wrong: str = ""
    absent: str = ""


@dataclass(frozen=True)
class Defect:
    """One defect of TVM's PyTorch frontend, and what is done about it here.

    Attributes:
        name: Identifier, also the test id.
        title: One line.
        where: The function of TVM in which the fault lies.
        what: What happens and why, in a few sentences.
        reproduction: The smallest module and inputs that show it.
        raw: What unmodified TVM does with it.
        workaround: What is done here, in a sentence or two.
        converters: Importer functions that replace TVM's, by operator name as the importer spells it.
        passes: Rewrites of the exported graph before the import.
        upstream: The release of apache-tvm in which it was seen.
    """

    name: str
    title: str
    where: str
    what: str
    reproduction: Reproduction
    raw: RawOutcome
    workaround: str
    converters: Mapping[str, Converter] = field(default_factory=dict)
    passes: tuple[GraphPass, ...] = ()
    upstream: str = TESTED_VERSION
