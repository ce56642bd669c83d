"""Stands in for packages that are not installed and that sam3 imports without using them for what runs here."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.core.errors import HarnessError
from harness.models.sam3.patches.patch import wrapped


class StandIn:
    """A package that is not installed, or a name from one, as sam3 sees it.

    While sam3 is imported, a call, as of a decorator, makes another one. Any later use raises an error.
    """

    importing = False

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> StandIn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return StandIn(f"{self._name}.{attribute}")

    def _use(self, *_: Any, **__: Any) -> StandIn:
        if StandIn.importing:
            return StandIn(f"{self._name}(…)")
        package = self._name.partition(".")[0]
        raise HarnessError(
            f"sam3 used {self._name}, but {package} is not installed here; install {package} to run this part."
        )

    __call__ = _use
    __getitem__ = _use

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        """Returns the base of a class that sam3 derives from it: one that no object can be made of."""
        return (type(self._name, (), {"__init__": self._use}),)


@contextmanager
def importing_without(packages: set[str]) -> Iterator[None]:
    """Gives sam3, and nobody else, stand-ins for packages; more may be added on the way."""

    # Through __import__ and not sys.modules, because torch's own optional `import triton` must keep failing.
    def import_module(
        real: Any, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        package = name.partition(".")[0]
        if level == 0 and package in packages and importer.partition(".")[0] == "sam3":
            return StandIn(name if fromlist else package)
        return real(name, globals, locals, fromlist, level)

    StandIn.importing = True
    try:
        with wrapped(builtins, "__import__", import_module):
            yield
    finally:
        StandIn.importing = False
