"""Explains the lowering of each Relax operator of a component: by a kernel, by loops, or by TVM's default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.compiler.targets import TARGETS
from harness.core.case import Case
from harness.core.outcome import Stage
from harness.core.settings import SEEDED, Settings
from harness.models.registry import component_of

if TYPE_CHECKING:
    from harness.compiler.schedules.common.provenance import Operator

_LINES_SHOWN = 3


@dataclass(frozen=True)
class Explanation:
    """The operators of one case's main sample, in the order of the imported module."""

    case: Case
    operators: tuple[Operator, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Number of operators by kind of lowering."""
        return dict(Counter(operator.how.value for operator in self.operators))


def explain(
    case: Case,
    settings: Settings = SEEDED,
    save: Path | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Explanation:
    """Exports, imports and lowers a component in a worker process, and returns how each operator was lowered.

    Args:
        case: The case.
        settings: Schedules, processors and the groups of products that stay float32.
        save: Folder for the exported program and the text of the Relax module.
        on_stage: Called with the name of each stage, soon after the worker has entered it.

    Raises:
        HarnessError: The case is not a component, or lowering it fails.
    """
    from harness.core.processes.call import run_isolated

    component_of(case.component, "explain")
    result = run_isolated(f"{__name__}:explain_component", case, settings, save, on_stage=on_stage)
    explanation: Explanation = result.require(f"cannot explain {case.id}")
    return explanation


def explain_component(
    case: Case, settings: Settings, save: Path | None, on_stage: Callable[[str], None]
) -> Explanation:
    """Explains a component in this process; the arguments are those of `explain`."""
    from harness.compiler.schedules.common.provenance import trace
    from harness.compiler.tuned.database import choose_schedules
    from harness.models.importing import imported_module

    target = TARGETS[case.target]
    module = imported_module(case, on_stage, settings.float32, save)
    on_stage(Stage.COMPILE)
    tvm_target = target.tvm_target(settings.processors)
    schedules = choose_schedules(settings.database, case.target, settings.processors).schedules
    pipeline = target.pipeline(tvm_target, schedules)
    return Explanation(case, tuple(trace(module, pipeline, tvm_target)))


def render(explanation: Explanation) -> Any:
    """Builds a table for the terminal (rich), with one row for operators of one kind that are lowered alike."""
    from rich.table import Table
    from rich.text import Text

    from harness.compiler.schedules.common.provenance import MEANINGS, LoweringKind

    groups: dict[tuple[Any, ...], list[Operator]] = {}
    for operator in explanation.operators:
        functions = operator.functions if operator.how is LoweringKind.KERNEL else ()
        groups.setdefault((operator.how, operator.name, *functions), []).append(operator)
    table = Table("operator", "calls", "shapes", "lowered to", title=explanation.case.id, highlight=False)
    for kind in LoweringKind:
        groups_of_kind = [group for group in groups.values() if group[0].how is kind]
        if not groups_of_kind:
            continue
        count = sum(map(len, groups_of_kind))
        table.add_section()
        style = "red" if kind is LoweringKind.UNSCHEDULED else "bold"
        table.add_row(Text(kind.value, style=style), str(count), "", MEANINGS[kind])
        for group in sorted(groups_of_kind, key=lambda group: group[0].name):
            table.add_row(
                f"  {group[0].name}",
                str(len(group)),
                Text(_first_lines(f"{' · '.join(operator.inputs)} → {operator.output}" for operator in group)),
                Text(_first_lines(map(_description, group))),
            )
    return table


def summary(explanation: Explanation) -> str:
    """Returns the totals in one line, and the operators that got TVM's default lowering."""
    from harness.compiler.schedules.common.provenance import LoweringKind

    totals = ", ".join(f"{count} {kind}" for kind, count in Counter(explanation.totals).most_common())
    at_load = sum(operator.at_load for operator in explanation.operators)
    lines = [f"{len(explanation.operators)} operators: {totals}; {at_load} of them run once, when the model is loaded"]
    for kind, text in (
        (LoweringKind.DEFAULT, "no kernel, but scheduled loops"),
        (LoweringKind.UNSCHEDULED, "left as TVM has it"),
    ):
        names = Counter(operator.name for operator in explanation.operators if operator.how is kind)
        if names:
            lines.append(f"{text}: " + ", ".join(f"{name} {count}" for name, count in names.most_common()))
    return "\n".join(lines)


def document(explanation: Explanation) -> dict[str, Any]:
    """Returns everything that is known of every operator as JSON-able data."""
    operators = [asdict(operator) for operator in explanation.operators]
    return asdict(explanation.case) | {"totals": explanation.totals, "operators": operators}


def _first_lines(lines: Iterable[str]) -> str:
    """Returns the first distinct lines that are not empty, and the number of others."""
    distinct = list(dict.fromkeys(filter(None, lines)))
    others = [f"and {len(distinct) - _LINES_SHOWN} more"] if len(distinct) > _LINES_SHOWN else []
    return "\n".join([*distinct[:_LINES_SHOWN], *others])


def _description(operator: Operator) -> str:
    from harness.compiler.schedules.common.provenance import LoweringKind

    companions = Counter(operator.beside) - Counter([operator.name])
    names = dict.fromkeys("fused" if name.startswith("fused_") else name for name in operator.functions)
    functions = " and ".join(names) + (", at load" if operator.at_load else "")
    if operator.how is LoweringKind.FOLDED:
        return functions
    companion_names = ", ".join(name if count == 1 else f"{count} {name}" for name, count in companions.items())
    companion_text = f"with {companion_names}" if companion_names else ""
    return ": ".join(filter(None, [functions, "; ".join(filter(None, [operator.detail, companion_text]))]))
