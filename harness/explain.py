"""Explains the lowering of each Relax operator of a component: by a kernel, by loops, or by TVM's default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import files
from harness.core.budget import NONE, Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import Stage
from harness.core.processors import THIS_MACHINE, Processors
from harness.models.registry import subjects
from harness.targets import TARGETS

if TYPE_CHECKING:
    from harness.schedules.common.provenance import Operator

ADVICE = "choose another file with --json"
"""Advice for the user where the file cannot be written."""

_SHAPES_SHOWN = 3
_FUNCTIONS_SHOWN = 3


@dataclass(frozen=True)
class Explanation:
    """The operators of one case's main sample, in the order of the imported module."""

    case: Case
    operators: tuple[Operator, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Number of operators by how they were lowered."""
        return dict(Counter(operator.how.value for operator in self.operators))


def explain(
    case: Case,
    on_stage: Callable[[str], None] = lambda stage: None,
    database: Path | None = None,
    processors: Processors = THIS_MACHINE,
    float32: Groups = NONE,
) -> Explanation:
    """Exports, imports and lowers a component in a worker process and tells what became of each operator.

    Args:
        case: What to explain.
        on_stage: Called with the name of each stage, soon after it was entered.
        database: Folder of a tuning database whose schedules to lower with; None for the default schedules.
        processors: The processors to lower for.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: The case is about the whole model, or does not get as far as lowering.
    """
    from harness.processes import WorkerEnd, run_isolated

    known = subjects().get(case.component)
    if known is None or known.whole:
        raise HarnessError(f"{case.component} is no component: explain the components that it is made of")
    request = (case, database, processors, float32)
    ended = run_isolated("harness.explain:explain_request", request, breadcrumb=on_stage)
    if ended.kind is not WorkerEnd.OK:
        first_line = ended.error.message.partition("\n")[0] if ended.error else ended.kind.value
        raise HarnessError(
            f"cannot explain {case.id}: {ended.stage} {ended.kind.value.replace('_', ' ')}: {first_line}"
        )
    explanation: Explanation = ended.value
    return explanation


def explain_request(
    request: tuple[Case, Path | None, Processors, Groups], announce: Callable[[str], None]
) -> Explanation:
    """Calls `explain` as `harness.processes` calls functions, in this process."""
    from harness.models.lowered import imported_module
    from harness.schedules.common.provenance import trace
    from harness.tuned.database import chosen_schedules

    case, database, processors, float32 = request
    target = TARGETS[case.target]
    module = imported_module(case, announce, float32)
    announce(Stage.COMPILE)
    tvm_target = target.tvm_target(processors)
    pipeline = target.pipeline(tvm_target, chosen_schedules(database, case.target, processors).schedules)
    return Explanation(case, tuple(trace(module, pipeline, tvm_target)))


def render(explanation: Explanation) -> Any:
    """Makes a table for the terminal (rich), with operators of one kind that are lowered alike on one line."""
    from rich.table import Table
    from rich.text import Text

    from harness.schedules.common.provenance import MEANINGS, How

    groups: dict[tuple[Any, ...], list[Operator]] = {}
    for operator in explanation.operators:
        own = operator.functions if operator.how is How.KERNEL else ()
        groups.setdefault((operator.how, operator.name, *own), []).append(operator)
    table = Table("operator", "calls", "shapes", "lowered to", title=explanation.case.id, highlight=False)
    for how in How:
        rows = [group for group in groups.values() if group[0].how is how]
        if not rows:
            continue
        count = sum(map(len, rows))
        table.add_section()
        table.add_row(Text(how.value, style="red" if how is How.UNSCHEDULED else "bold"), str(count), "", MEANINGS[how])
        for group in sorted(rows, key=lambda group: group[0].name):
            table.add_row(f"  {group[0].name}", str(len(group)), Text(_shapes(group)), Text(_lowered(group)))
    return table


def summary(explanation: Explanation) -> str:
    """Returns the totals in one line, and what fell to TVM's default, by operator."""
    from harness.schedules.common.provenance import How

    totals = ", ".join(f"{count} {how}" for how, count in sorted(explanation.totals.items(), key=lambda item: -item[1]))
    at_load = sum(operator.at_load for operator in explanation.operators)
    lines = [f"{len(explanation.operators)} operators: {totals}; {at_load} of them run once, when the model is loaded"]
    for how, text in ((How.DEFAULT, "no kernel, but scheduled loops"), (How.UNSCHEDULED, "left as TVM has it")):
        names = Counter(operator.name for operator in explanation.operators if operator.how is how)
        if names:
            lines.append(f"{text}: " + ", ".join(f"{name} {count}" for name, count in names.most_common()))
    return "\n".join(lines)


def write_json(explanations: Sequence[Explanation], path: Path) -> None:
    """Writes everything that is known of every operator, complete or not at all.

    Raises:
        HarnessError: If the file cannot be written.
    """
    cases = [
        {
            **asdict(explanation.case),
            "totals": explanation.totals,
            "operators": [asdict(operator) for operator in explanation.operators],
        }
        for explanation in explanations
    ]
    files.write_json(path, {"schema": 1, "cases": cases}, advice=ADVICE)


def _shapes(group: Iterable[Operator]) -> str:
    shapes = dict.fromkeys(f"{' · '.join(operator.inputs)} → {operator.output}" for operator in group)
    more = [f"and {len(shapes) - _SHAPES_SHOWN} more"] if len(shapes) > _SHAPES_SHOWN else []
    return "\n".join([*list(shapes)[:_SHAPES_SHOWN], *more])


def _lowered(group: Sequence[Operator]) -> str:
    """Returns what the operators of a group became, on lines of their own where they differ."""
    lines = list(dict.fromkeys(filter(None, map(_own_words, group))))
    more = [f"and {len(lines) - _FUNCTIONS_SHOWN} more"] if len(lines) > _FUNCTIONS_SHOWN else []
    return "\n".join([*lines[:_FUNCTIONS_SHOWN], *more])


def _own_words(operator: Operator) -> str:
    from harness.schedules.common.provenance import How

    others = Counter(operator.beside) - Counter([operator.name])
    names = dict.fromkeys("fused" if name.startswith("fused_") else name for name in operator.functions)
    where = " and ".join(names) + (", at load" if operator.at_load else "")
    if operator.how is How.FOLDED:
        return where
    named = ", ".join(name if count == 1 else f"{count} {name}" for name, count in others.items())
    beside = f"with {named}" if named else ""
    return ": ".join(filter(None, [where, "; ".join(filter(None, [operator.detail, beside]))]))
