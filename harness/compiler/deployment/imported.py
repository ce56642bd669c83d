"""Imports a model's entry points as Relax modules, with the values of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.compiler.deployment.deployable import Deployable, ModelOptions
from harness.compiler.targets import TARGETS
from harness.core.budget import NO_GROUPS, Groups, check_groups
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.settings import Settings
from harness.runtime.preparing import Array

if TYPE_CHECKING:
    import tvm

OnStage = Callable[[str], None]
"""Takes the name of each stage as it begins."""

Parameters = Mapping[str, Array]
"""Values of weights by name, in the order in which the imported function takes them; bfloat16 is ml_dtypes'."""


@dataclass(frozen=True)
class ImportedEntry:
    """An entry point as a Relax module with the function `main`, and the values of its weights in the order of `main`.

    Attributes:
        name: Name of the entry point.
        outputs: Names of its results, in order.
        module: The module.
        parameters: Its weights.
        float32: Groups of products that stay float32 in a half precision.
        below: Exclusive upper bound of each index input, by name.
    """

    name: str
    outputs: tuple[str, ...]
    module: tvm.IRModule
    parameters: Parameters
    float32: Groups
    below: Mapping[str, int]


@dataclass(frozen=True)
class ArtifactSpec:
    """The specification of a folder to compile.

    Attributes:
        deployable: The model.
        case: Its strategy, target, scale, seed, precision, frontend and weights.
        settings: Where the weights come from.
        options: The model's own options.
        entry_names: Names of the entry points to import, all if there is none.
        float32: Groups of products that stay float32 in a half precision.
    """

    deployable: Deployable
    case: Case
    settings: Settings
    options: ModelOptions
    entry_names: Sequence[str] = ()
    float32: Groups = NO_GROUPS

    def import_entries(self, on_stage: OnStage) -> Iterator[ImportedEntry]:
        """Builds the model, then yields its entry points.

        Raises:
            HarnessError: The checkpoint does not fit.
            Exception: Any error that the strategy `none` causes in the importer.
        """
        from harness.compiler.lowering.route import Route

        with self.deployable.context():
            on_stage("build")
            for program in self.deployable.programs(self.case, self.settings, self.options):
                if self.entry_names and program.name not in self.entry_names:
                    continue
                strategy = self.case.strategy if program.uses_rope else DEFAULT_STRATEGY
                route = Route.from_case(replace(self.case, strategy=strategy), self.float32)
                on_stage(f"export {program.name}")
                exported = route.export(program.module, tuple(program.example.values()), program.axes)
                on_stage(f"import {program.name}")
                lowered = route.lower(exported, program.module)
                parameters = lowered.parameters()
                yield ImportedEntry(
                    program.name, program.outputs, lowered.module, parameters, lowered.float32, program.below
                )


def import_entries(spec: ArtifactSpec, on_stage: OnStage) -> list[ImportedEntry]:
    """Returns the imported entry points of an artifact, after a check of the target and the groups.

    Raises:
        HarnessError: The machine cannot compile for the target, the checkpoint does not fit, or no entry point has any
            of the groups that stay float32.
        Exception: Any error that the strategy `none` causes in the importer.
    """
    target = spec.case.target
    problem = TARGETS[target].compile_problem()
    if problem is not None:
        raise HarnessError(f"cannot compile for {target}: {problem}")
    items = list(spec.import_entries(on_stage))
    check_groups(spec.float32, [item.float32 for item in items], "what is compiled", partial=True)
    return items


def drain(items: list[ImportedEntry]) -> Iterator[tuple[str, Parameters]]:
    """Yields name and parameters of each entry point in turn, removing it from the list to free its memory."""
    while items:
        item = items.pop(0)
        yield item.name, item.parameters
