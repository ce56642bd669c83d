"""The shallow models with seed 0 and what they compute on the photograph, made once per process."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from harness.core.case import Case
from harness.core.settings import SEEDED
from harness.models.sam3.build import build_model
from harness.models.sam3.captures import GROUNDING, Capture
from harness.models.sam3.upstream import upstream

if TYPE_CHECKING:
    from harness.models.sam3.capture import Activations


@cache
def shallow_model() -> Any:
    """`build_model("shallow", 0)`; shared, so whoever changes it must put it back."""
    return build_model("shallow", 0)


@cache
def interactive_model() -> Any:
    """The same with upstream's SAM 2 neck and tracker; shared as well."""
    return build_model("shallow", 0, interactive=True)


@cache
def photograph() -> Activations:
    """What passes between the parts of the shallow model on the photograph with its prompts."""
    from harness.models.sam3.capture import capture, load_prompts

    with upstream():
        return capture(shallow_model(), load_prompts())


@cache
def captured(capture: Capture) -> Any:
    """What a run of the shallow model captures; kept on disk like the inputs of cases, because it takes a minute."""
    from harness.models.sam3 import source

    if capture is GROUNDING:
        return photograph()
    with upstream():
        return source.captured(capture, Case("", "real", "llvm", "shallow"), SEEDED, interactive_model())
