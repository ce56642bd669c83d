"""Budget: which groups of products stay float32 in a half precision, so that a limit on the error holds; a file.

`sam3-tvm budget` finds one and writes it, and every command that compiles in half precision takes it. A group is all
products of one module of the model, by its path there: `transformer.decoder.bbox_embed.layers.0`. Needs neither torch
nor tvm.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.precision import PRECISIONS

FORMAT = 1
"""Version of the file."""

Groups = frozenset[str]
"""Names of groups of products."""

NONE: Groups = frozenset()
"""No group stays float32: everything that may be half precision is."""


@dataclass(frozen=True)
class Budget:
    """A choice of groups that stay float32, and what it is for.

    Attributes:
        model: Name of the model.
        component: Name of the component that was measured.
        scale: How much of the published model was built.
        target: Target that was compiled for.
        precision: The half precision of the other groups.
        limit: Largest r_rms of every output: its rms error against float64, divided by autocast's.
        float32: Names of the groups that stay float32, in the order in which the component computes them.
    """

    model: str
    component: str
    scale: str
    target: str
    precision: str
    limit: float
    float32: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, as the file has them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT, **values, "scale": str(self.scale), "float32": list(self.float32)}

    def check_fits(self, case: Case, model: str, file: Path) -> None:
        """Makes sure that the budget is for what a case compiles.

        Args:
            case: Its scale, target and precision are looked at, not its component.
            model: Name of its model.
            file: The file that the budget is from, for the sentence.

        Raises:
            HarnessError: It is for something else.
        """
        if self.model != model:
            raise HarnessError(f"{file} is a budget for the model {self.model}, not {model}: give another file")
        for kind, own, other in (
            ("precision", self.precision, case.precision),
            ("scale", self.scale, str(case.scale)),
            ("target", self.target, case.target),
        ):
            if own != other:
                raise HarnessError(f"{file} is a budget for --{kind} {own}, not {other}: give another --{kind} or file")


def read_budget(file: Path) -> Budget:
    """Reads what `sam3-tvm budget` wrote; what was measured is for people and is not read.

    Raises:
        HarnessError: It cannot be read, or is no budget.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HarnessError(f"cannot read the budget {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise HarnessError(f"{file} is no budget ({error}): give a file that `sam3-tvm budget` wrote") from error
    if not isinstance(data, dict) or "float32" not in data or "component" not in data:
        raise HarnessError(f"{file} is no budget: give a file that `sam3-tvm budget` wrote")
    if data.get("format") != FORMAT:
        raise HarnessError(
            f"{file} was written in version {data.get('format')} of the format, this program reads version {FORMAT}: "
            "run `sam3-tvm budget` again"
        )
    return _budget(data, file)


def _budget(data: Mapping[str, Any], file: Path) -> Budget:
    names = [field.name for field in fields(Budget)]
    missing = [name for name in names if name not in data]
    texts = all(isinstance(data.get(name), str) for name in names if name not in ("limit", "float32"))
    groups = data["float32"]
    listed = isinstance(groups, list) and all(isinstance(name, str) for name in groups)
    if missing or not texts or not listed or not isinstance(data["limit"], int | float):
        reason = f"it lacks {missing[0]}" if missing else "a value has the wrong type"
        raise HarnessError(f"{file} is a damaged budget, {reason}: run `sam3-tvm budget` again")
    if data["precision"] not in PRECISIONS or not PRECISIONS[data["precision"]].is_half:
        raise HarnessError(f"{file} is a budget for the precision {data['precision']!r}, which is no half precision")
    return Budget(**{name: data[name] for name in names} | {"float32": tuple(groups), "limit": float(data["limit"])})


def read_budgets(files: Sequence[Path]) -> dict[Path, Budget]:
    """Reads several files, each for another component of one model.

    Raises:
        HarnessError: One cannot be read, or two are for one component.
    """
    found: dict[Path, Budget] = {}
    for file in files:
        budget = read_budget(file)
        for other, known in found.items():
            if known.component == budget.component:
                raise HarnessError(f"{other} and {file} are both budgets for {known.component}: give one of them")
            if known.model != budget.model:
                raise HarnessError(f"{other} is a budget for the model {known.model}, {file} for {budget.model}")
        found[file] = budget
    return found


def check_known(float32: Collection[str], found: Iterable[Collection[str]], what: str, *, some: bool = False) -> None:
    """Makes sure that every group that is to stay float32 is a group of something that is compiled.

    Args:
        float32: Names of the groups.
        found: Names of those among them that each program has.
        what: What is compiled, for the sentence.
        some: Whether some of them are enough. A whole model does not compute all of each component: not what makes an
            output that nothing reads, nor what clicks need if it is compiled without.

    Raises:
        HarnessError: There is no such group.
    """
    unknown = sorted(set(float32).difference(*map(set, found)))
    if unknown and (not some or len(unknown) == len(set(float32))):
        raise HarnessError(
            f"the budget keeps {unknown[0]!r} in float32, and {what} has no such group of products"
            f"{f' (nor {len(unknown) - 1} others)' if len(unknown) > 1 else ''}: "
            "it is of another component, model or version; run `sam3-tvm budget` again or give another file"
        )
