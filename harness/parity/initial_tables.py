"""Registers tables that the modules of a model fill on their first forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REGISTERED: dict[str, Mapping[str, Any]] = {}


def register_tables(cls: str, initial: Mapping[str, Any]) -> None:
    """Registers tables of a class of modules, which are results and not weights; the package of the model calls it.

    The oracle fills its own tables, even if the module has already run.

    Args:
        cls: Name of the class.
        initial: The initial values by name of the attribute.
    """
    _REGISTERED[cls] = initial


def initial_tables(module: object) -> dict[str, Any]:
    """Returns the initial values of the tables that a module has, by name of the attribute."""
    return {
        name: value
        for cls in type(module).__mro__
        for name, value in _REGISTERED.get(cls.__name__, {}).items()
        if hasattr(module, name)
    }
