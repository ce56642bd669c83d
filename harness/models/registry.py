"""The registry of models and of their subjects.

A package of another distribution adds a model through the entry point group `sam3_tvm.models`; a module that is named
in `SAM3_TVM_MODELS` (several are separated by commas) does so without being installed. Either names a module that has a
`MODEL`.
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
ENTRY_POINT_GROUP = "sam3_tvm.models"
DEFAULT_MODEL = "sam3"

_OWN = {DEFAULT_MODEL: "harness.models.sam3.model"}
"""The models of this project: name and module; a new one is a package and a line here."""


@cache
def models() -> dict[str, Model]:
    """Returns every model by name: this project's, then those that were added.

    Raises:
        HarnessError: A module cannot be imported, has no `MODEL`, or two models or subjects have one name.
    """
    modules = list(_OWN.values()) + [point.value for point in entry_points(group=ENTRY_POINT_GROUP)]
    # A border as the entry points are: each process finds the models before anybody can pass it an option.
    modules += [name.strip() for name in os.environ.get(MODELS_VARIABLE, "").split(",") if name.strip()]
    found: dict[str, Model] = {}
    for module in modules:
        model = _model_of(module)
        if model.name in found:
            raise HarnessError(f"two models have the name {model.name!r}: rename the one in {module}")
        known = {subject for other in found.values() for subject in other.subjects}
        if twice := known & set(model.subjects):
            raise HarnessError(f"two models have a subject {min(twice)!r}: rename the one in {module}")
        found[model.name] = model
    return found


@cache
def subjects() -> dict[str, Subject]:
    """Returns every subject of every model by name."""
    return {name: subject for model in models().values() for name, subject in model.subjects.items()}


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
