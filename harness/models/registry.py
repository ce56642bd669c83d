"""Registers models and their subjects.

Another distribution adds a model through the entry point group `sam3_tvm.models`. A module named in `SAM3_TVM_MODELS`,
whose entries are separated by commas, does so without being installed. Either module has a `MODEL`.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.metadata import entry_points

from harness.core.errors import HarnessError
from harness.models.model import Model
from harness.models.subject import Subject

MODELS_VARIABLE = "SAM3_TVM_MODELS"
"""The environment variable with modules that add models, separated by commas."""
ENTRY_POINT_GROUP = "sam3_tvm.models"
DEFAULT_MODEL = "sam3"

_BUILTIN_MODELS = {DEFAULT_MODEL: "harness.models.sam3.model", "sam3.1": "harness.models.sam31.model"}
"""Name of each model of this project → its module."""


@cache
def models() -> dict[str, Model]:
    """Returns every model by name: the models of this project first, then the added ones.

    Raises:
        HarnessError: A module cannot be imported or has no `MODEL`, or two models or two subjects have the same name.
    """
    modules = list(_BUILTIN_MODELS.values()) + [point.value for point in entry_points(group=ENTRY_POINT_GROUP)]
    # Read from the environment, because each process finds the models before it is passed an option.
    modules += [name.strip() for name in os.environ.get(MODELS_VARIABLE, "").split(",") if name.strip()]
    registered: dict[str, Model] = {}
    for module in modules:
        model = _model_of(module)
        if model.name in registered:
            raise HarnessError(f"two models have the name {model.name!r}: rename the one in {module}")
        subject_names = {subject for earlier in registered.values() for subject in earlier.subjects}
        if twice := subject_names & set(model.subjects):
            raise HarnessError(f"two models have a subject {min(twice)!r}: rename the one in {module}")
        registered[model.name] = model
    return registered


@cache
def subjects() -> dict[str, Subject]:
    """Returns every subject of every model by name."""
    return {name: subject for model in models().values() for name, subject in model.subjects.items()}


def component_of(name: str, verb: str) -> Subject:
    """Returns the component of a name.

    Args:
        name: The name.
        verb: What to do with the components of a whole model, which the error advises.

    Raises:
        HarnessError: The name is that of a whole model, or unknown.
    """
    subject = subjects().get(name)
    if subject is None or subject.whole:
        raise HarnessError(f"{name} is no component: {verb} the components that it is made of")
    return subject


def _model_of(module: str) -> Model:
    try:
        model = importlib.import_module(module).MODEL
    except (ImportError, AttributeError) as error:
        raise HarnessError(
            f"{module} adds no model ({error}): it must be importable and have a MODEL; correct {MODELS_VARIABLE} "
            f"or the entry point in {ENTRY_POINT_GROUP}"
        ) from error
    if not isinstance(model, Model):
        raise HarnessError(f"{module}.MODEL is a {type(model).__name__}: make it a harness.models.model.Model")
    return model
