"""Defines a deployable model: entry points, functions that are written as kernels, and accompanying files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case import Case
from harness.core.program import Program
from harness.core.settings import Settings
from harness.core.weights import Weights
from harness.runtime.manifest import Capacity

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


def _no_files() -> Mapping[str, Path]:
    return {}


def _always(_checkpoint: Path) -> bool:
    return True


def _never(_checkpoint: Path | None) -> bool:
    return False


@dataclass(frozen=True)
class Deployable:
    """A model that `harness.compiler.deployment` compiles into a folder.

    Attributes:
        model: Its name, which the manifest keeps.
        programs: Takes a case, settings and a capacity; builds the model, then yields its entry points, which share its
            weights.
        context: The context in which the model is built and exported.
        kernels: Functions that are written as kernels.
        files: Returns additional files of the folder, by their names in it.
        vocabulary: Name of the tokenizer's vocabulary among `files`; empty if there is none.
        knows_points: Whether a checkpoint's weights know points as prompts.
        knows_clicks: Whether weights predict masks of one object: those of a checkpoint, or seeded ones.
        grounding: Names of the entry points that a folder for clicks alone leaves out.
        weights: Names of the distributions that its weights can be drawn from.
    """

    model: str
    programs: Callable[[Case, Settings, Capacity], Iterator[Program]]
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    kernels: tuple[KernelFunction, ...] = ()
    files: Callable[[], Mapping[str, Path]] = _no_files
    vocabulary: str = ""
    knows_points: Callable[[Path], bool] = _always
    knows_clicks: Callable[[Path | None], bool] = _never
    grounding: tuple[str, ...] = ()
    weights: tuple[str, ...] = (Weights.SEEDED.value,)
