"""Defines a command that takes the options of a model besides its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand

from harness.compiler.deployment.deployable import ModelOptions
from harness.models.registry import DEFAULT_MODEL, models


class ModelCommand(TyperCommand):
    """A command with `--model`, whose context's `obj` gets the `ModelOptions` of the named model, or of the default."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._own, self._options = self.params, ModelOptions

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Adds the options of the model that the arguments name, then parses them."""
        named = [word for flag, word in pairwise(["", *args]) if flag == "--model" or word.startswith("--model=")]
        model = models().get(named[-1].removeprefix("--model=") if named else DEFAULT_MODEL)
        deployable = None if model is None else model.deployable
        self._options = ModelOptions if deployable is None else deployable.options
        self.params = [*self._own, *_parameters(self._options)]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Calls the command with the values of its own options."""
        added = {parameter.name for parameter in self.params} - {parameter.name for parameter in self._own}
        ctx.obj = self._options(**{name: ctx.params.pop(name) for name in added})
        return super().invoke(ctx)


def _parameters(options: type[ModelOptions]) -> list[Any]:
    """Returns a model's options as parameters of a command."""
    app = typer.Typer(add_completion=False)
    app.command()(options)
    return list(typer.main.get_command(app).params)
