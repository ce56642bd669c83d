"""Defines a deployable model: entry points, functions that are written as kernels, files and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.core.weights import Weights
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
