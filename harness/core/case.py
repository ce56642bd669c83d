"""Case: one component × strategy × target × scale × seed × precision, the unit of verification; and selecting cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from harness.core.errors import HarnessError
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.lowering.rope import STRATEGIES
from harness.models.sam3.components import COMPONENTS
from harness.models.sam3.components.component import Component
from harness.models.sam3.end_to_end import END_TO_END, EndToEnd
from harness.targets import TARGETS

DEFAULT_STRATEGY = "real"
"""The strategy that applies to every component, with rotary position encoding inside or not."""


SUBJECTS: dict[str, Component | EndToEnd] = {**COMPONENTS, END_TO_END.name: END_TO_END}
"""What a case can be about: the components, and the whole model."""


class Scale(StrEnum):
    """How much of the published model is built; see `harness.models.sam3.scales`."""

    SHALLOW = "shallow"
    FULL = "full"


@dataclass(frozen=True, order=True)
class Case:
    """One component × strategy × target × scale × seed × precision, all by registry name."""

    component: str
    strategy: str
    target: str
    scale: str = Scale.SHALLOW.value
    seed: int = 0
    precision: str = DEFAULT_PRECISION

    @property
    def id(self) -> str:
        """The pytest id, for instance `vision_backbone-real-llvm-shallow`; a precision other than fp32 follows."""
        name = f"{self.component}-{self.strategy}-{self.target}-{self.scale}"
        return name if self.precision == DEFAULT_PRECISION else f"{name}-{self.precision}"


def strategies_of(component: str) -> tuple[str, ...]:
    """The strategies that apply to a component: all if it has rotary position encoding, otherwise only the default."""
    return tuple(STRATEGIES) if SUBJECTS[component].uses_rope else (DEFAULT_STRATEGY,)


def checked(kind: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names without repetition, or all that are known if none is given.

    Raises:
        HarnessError: If a name is unknown; the nearest known one is suggested.
    """
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise HarnessError(f"Unknown {kind} {name!r}: {hint}")
    return tuple(dict.fromkeys(names)) or tuple(known)


def select(
    components: Sequence[str] = (),
    strategies: Sequence[str] = (),
    targets: Sequence[str] = (),
    scales: Sequence[str] = (Scale.SHALLOW.value,),
    seed: int = 0,
    precisions: Sequence[str] = (DEFAULT_PRECISION,),
) -> tuple[Case, ...]:
    """All cases of the given names; an empty sequence stands for every known one.

    The whole model is not one of the components that no name stands for: it has to be named.

    Raises:
        HarnessError: If a name is unknown, a named target compiles in none of the precisions, or none of the
            strategies and precisions applies to any of the components.
    """
    precisions = checked("precision", precisions, tuple(PRECISIONS))
    chosen = checked("target", targets, tuple(TARGETS))
    for name in chosen if targets else ():
        check_precisions(name, precisions)
    components = checked("component", components, tuple(SUBJECTS)) if components else tuple(COMPONENTS)
    strategies = checked("strategy", strategies, tuple(STRATEGIES))
    scales = checked("scale", scales, tuple(scale.value for scale in Scale))
    cases = tuple(
        Case(component, strategy, target, scale, seed, precision)
        for target in chosen
        for scale in scales
        for precision in precisions
        for component in components
        if precision in TARGETS[target].precisions
        for strategy in strategies_of(component)
        if strategy in strategies
    )
    if not cases:
        raise HarnessError(
            f"No case to run: {', '.join(components)} has no rotary position encoding, "
            f"so only --strategy {DEFAULT_STRATEGY} applies."
        )
    return cases


def check_precisions(target: str, precisions: Sequence[str]) -> None:
    """Refuses a target that compiles in none of the precisions.

    Raises:
        HarnessError: It says what the target compiles in, and which target compiles in all that was asked for.
    """
    known = TARGETS[target].precisions
    if set(known).isdisjoint(precisions):
        others = [name for name, other in TARGETS.items() if set(precisions) <= set(other.precisions)]
        raise HarnessError(
            f"Target {target} compiles in {', '.join(known)} only, not in {', '.join(precisions)}: "
            f"give --target {' or '.join(others)}, or another --precision."
        )
