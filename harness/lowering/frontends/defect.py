"""Defect: one thing that a frontend gets wrong, as plain data for the import, the tests and the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
    """The result of the reproduction in an unmodified frontend.

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
    """One defect of a frontend, and what is done about it here.

    Attributes:
        name: Identifier, also the test id.
        title: One line.
        where: The function in which the fault lies.
        what: What happens and why, in a few sentences.
        reproduction: The smallest module and inputs that show it.
        raw: What the unmodified frontend does with it.
        workaround: What is done here, in a sentence or two.
    """

    name: str
    title: str
    where: str
    what: str
    reproduction: Reproduction
    raw: RawOutcome
    workaround: str
