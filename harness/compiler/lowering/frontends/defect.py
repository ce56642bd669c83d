"""Defines a defect of a frontend as plain data for the import, the tests and the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Reproduction = Callable[[], "tuple[torch.nn.Module, tuple[torch.Tensor, ...]]"]
"""Returns the smallest module and inputs that show the defect."""

TESTED_VERSION = "0.27.0.post1"
"""The apache-tvm release that has the defects."""


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
        reproduction: The smallest module and inputs that show it.
        raw: The result of the unmodified frontend.
        workaround: The workaround, in a sentence or two.
    """

    name: str
    title: str
    location: str
    description: str
    reproduction: Reproduction
    raw: RawOutcome
    workaround: str
