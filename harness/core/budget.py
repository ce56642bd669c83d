"""Reads and checks budgets: files that name the groups of products that stay float32 in half precision.

`sam3-tvm budget` writes a budget such that a limit on the error holds. Every command that compiles in half precision
reads one. A group is all products of one module of the model, named by its path there:
`transformer.decoder.bbox_embed.layers.0`. This module needs neither torch nor tvm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.precision import PRECISIONS

FORMAT = 1
"""Version of the file format."""

Groups = frozenset[str]
"""Names of groups of products."""

NO_GROUPS: Groups = frozenset()
"""The empty set of groups: every product that may be half precision is."""


@dataclass(frozen=True)
class Budget:
    """A choice of groups that stay float32, with the model, case and limit that it was made for.

    Attributes:
        model: Name of the model.
        component: Name of the component that was measured.
        scale: How much of the published model was built.
        target: Target that the component was compiled for.
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
        """Returns the fields as the file stores them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"format": FORMAT, **values, "scale": str(self.scale), "float32": list(self.float32)}

    def check_fits(self, case: Case, model: str, file: Path) -> None:
        """Checks that the budget was made for the model and settings of a case.

        Args:
            case: Its scale, target and precision are compared, its component is not.
            model: Name of the case's model.
            file: File of the budget, named in the error.

        Raises:
            HarnessError: The budget is for another model, precision, scale or target.
        """
        if self.model != model:
            raise HarnessError(f"{file} is a budget for the model {self.model}, not {model}: give another file")
        for field, expected, actual in (
            ("precision", self.precision, case.precision),
            ("scale", self.scale, str(case.scale)),
            ("target", self.target, case.target),
        ):
            if expected != actual:
                raise HarnessError(
                    f"{file} is a budget for --{field} {expected}, not {actual}: give another --{field} or file"
                )


def read_budget(file: Path) -> Budget:
    """Reads a file that `sam3-tvm budget` wrote, without the measurements in it, which are for people.

    Raises:
        HarnessError: The file cannot be read, or is not a budget.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HarnessError(f"cannot read the budget {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
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
    missing_names = [name for name in names if name not in data]
    texts_valid = all(isinstance(data.get(name), str) for name in names if name not in ("limit", "float32"))
    groups = data["float32"]
    groups_valid = isinstance(groups, list) and all(isinstance(name, str) for name in groups)
    limit: Any = data.get("limit")
    limit_valid = isinstance(limit, int | float) and abs(limit) <= sys.float_info.max
    if missing_names or not texts_valid or not groups_valid or not limit_valid:
        reason = f"it lacks {missing_names[0]}" if missing_names else "a value has the wrong type"
        raise HarnessError(f"{file} is a damaged budget, {reason}: run `sam3-tvm budget` again")
    if data["precision"] not in PRECISIONS or not PRECISIONS[data["precision"]].is_half:
        raise HarnessError(f"{file} is a budget for the precision {data['precision']!r}, which is no half precision")
    return Budget(**{name: data[name] for name in names} | {"float32": tuple(groups), "limit": float(limit)})


def read_budgets(files: Sequence[Path]) -> dict[Path, Budget]:
    """Reads several budgets, each for another component of one model.

    Raises:
        HarnessError: A file cannot be read, two budgets are for one component, or two are for different models.
    """
    budgets: dict[Path, Budget] = {}
    for file in files:
        budget = read_budget(file)
        for other_file, other_budget in budgets.items():
            if other_budget.component == budget.component:
                raise HarnessError(
                    f"{other_file} and {file} are both budgets for {other_budget.component}: give one of them"
                )
            if other_budget.model != budget.model:
                raise HarnessError(
                    f"{other_file} is a budget for the model {other_budget.model}, {file} for {budget.model}"
                )
        budgets[file] = budget
    return budgets


def check_groups(
    float32: Collection[str], program_groups: Iterable[Collection[str]], subject: str, *, partial: bool = False
) -> None:
    """Checks that every group that is to stay float32 is a group of a compiled program.

    Args:
        float32: Names of the groups.
        program_groups: For each program, the names of those groups that it has.
        subject: Name of the compiled thing, used in the error.
        partial: Whether one known group is enough. A whole model does not compute every group of each component: it
            leaves out what no output reads, and what its options leave out.

    Raises:
        HarnessError: A group is unknown.
    """
    unknown = sorted(set(float32).difference(*map(set, program_groups)))
    if unknown and (not partial or len(unknown) == len(set(float32))):
        raise HarnessError(
            f"the budget keeps {unknown[0]!r} in float32, and {subject} has no such group of products"
            f"{f' (nor {len(unknown) - 1} others)' if len(unknown) > 1 else ''}: "
            "it is of another component, model or version; run `sam3-tvm budget` again or give another file"
        )
