"""Defines a deployable model, its options and its files, and imports its entry points as Relax modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from harness.compiler.targets import TARGETS
from harness.core.budget import Groups, check_groups
from harness.core.case import DEFAULT_STRATEGY, Case, Weights
from harness.core.errors import HarnessError
from harness.core.program import Array, Program
from harness.core.settings import Settings
from harness.runtime.manifest import Manifest

if TYPE_CHECKING:
    import tvm


@dataclass(frozen=True)
class KernelFunction:
    """A function of the compiled model that is written as kernels.

    Attributes:
        name: Its name in the library.
        outputs: Names of its results, in order.
        module: Takes TVM's target and returns the module with the Relax function of that name.
        below: Exclusive upper bound of each index input, by name: a number or a dimension.
    """

    name: str
    outputs: tuple[str, ...]
    module: Callable[[tvm.target.Target], tvm.IRModule]
    below: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelOptions:
    """The options of `sam3-tvm compile` that a model adds; this class adds none.

    A model with options subclasses it as a frozen dataclass, whose fields have defaults and typer's annotations.
    """

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> Self:
        """Returns the options that a folder was compiled with.

        Args:
            folder: The folder, which errors name.
            manifest: Its manifest.

        Raises:
            ArtifactError: The model's part of the manifest is damaged.
        """
        return cls()

    def fit(self, case: Case, settings: Settings, print_note: Callable[[str], None]) -> Self:
        """Returns the options as they apply to a case and its weights; `print_note` takes a sentence on a difference.

        Raises:
            HarnessError: They contradict each other or the case.
        """
        return self

    def includes(self, options: Self) -> bool:
        """Returns whether a folder that was compiled with these options does all that one with the others does."""
        return True

    def manifest_part(self, settings: Settings) -> Mapping[str, Any]:
        """Returns the model's part of the manifest, as JSON has it."""
        return {}

    def summary(self) -> str:
        """Returns in a few words what a folder takes that was compiled with these options, for the command's output."""
        return ""


@dataclass(frozen=True)
class Deployable:
    """A model that `harness.compiler.deployment` compiles into a folder.

    Attributes:
        model: Its name, which the manifest keeps.
        programs: Takes a case, settings and the model's options; builds the model, then yields its entry points, which
            share its weights.
        context: The context in which the model is built and exported.
        kernels: Functions that are written as kernels.
        files: Returns additional files of the folder, by their names in it.
        options: The class of its options.
        weights: Names of the distributions that its weights can be drawn from.
    """

    model: str
    programs: Callable[[Case, Settings, Any], Iterator[Program]]
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    kernels: tuple[KernelFunction, ...] = ()
    files: Callable[[], Mapping[str, Path]] = dict
    options: type[ModelOptions] = ModelOptions
    weights: tuple[str, ...] = (Weights.SEEDED.value,)


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
        settings: Where the weights come from, and the groups of products that stay float32.
        options: The model's own options.
        entry_names: Names of the entry points to import, all if there is none.
    """

    deployable: Deployable
    case: Case
    settings: Settings
    options: ModelOptions
    entry_names: Sequence[str] = ()

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
                route = Route.from_case(replace(self.case, strategy=strategy), self.settings.float32)
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
    check_groups(spec.settings.float32, [item.float32 for item in items], "what is compiled", partial=True)
    return items


def drain(items: list[ImportedEntry]) -> Iterator[tuple[str, Parameters]]:
    """Yields name and parameters of each entry point in turn, removing it from the list to free its memory."""
    while items:
        item = items.pop(0)
        yield item.name, item.parameters
