"""Deployable: a model as entry points, functions that are written as kernels, and files that go with them."""

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
        name: What it is called in the library.
        outputs: Names of its results, in order.
        module: Takes TVM's target, makes the module with the Relax function of that name.
        below: By the name of an input that indexes something: what its values are less than, a number or a dimension.
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
        programs: Takes a case, settings and a capacity; builds the model, then yields its entry points, which share
            its weights.
        context: What building and exporting happen in.
        kernels: Functions that are written as kernels.
        files: Makes the files that the folder gets besides, by their names there.
        vocabulary: Name of the tokenizer's vocabulary among them; empty if there is none.
        knows_points: Whether a checkpoint's weights know points as prompts.
        knows_clicks: Whether weights predict masks of one object: those of a checkpoint, or seeded ones.
        grounding: Names of the entry points that a folder for clicks alone does without.
        weights: What its weights can be drawn by.
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
