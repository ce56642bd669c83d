"""Selects cases by name."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.symbolic import describe_symbolic_support, takes_symbolic_axes
from harness.compiler.targets import TARGETS, check_precisions
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, TINY, WEIGHTS, Case, Scale, Weights
from harness.core.errors import HarnessError
from harness.core.names import select_names
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.models.registry import subjects


def strategies_of(component: str, frontend: str = DEFAULT_FRONTEND) -> tuple[str, ...]:
    """Returns the strategies that apply to a subject through a frontend.

    A subject without rotary position encoding takes only the default strategy.
    """
    if not subjects()[component].uses_rope:
        return (DEFAULT_STRATEGY,)
    return tuple(name for name, strategy in STRATEGIES.items() if FRONTENDS[frontend].takes(strategy))


def select(
    components: Sequence[str] = (),
    strategies: Sequence[str] = (),
    targets: Sequence[str] = (),
    scales: Sequence[str] = (Scale.SHALLOW.value,),
    seed: int = 0,
    precisions: Sequence[str] = (DEFAULT_PRECISION,),
    frontends: Sequence[str] = (DEFAULT_FRONTEND,),
    weights: Sequence[str] = (Weights.SEEDED.value,),
) -> tuple[Case, ...]:
    """Returns all cases of the given names; an empty sequence stands for every known name.

    Empty `components` leaves out the whole models, which are selected by name only.

    Raises:
        HarnessError: A name is unknown, a scale is `tiny`, a named target compiles in none of the precisions, or none
            of the strategies, precisions and weights applies to any of the components.
    """
    known_subjects = subjects()
    precisions = select_names("precision", precisions, tuple(PRECISIONS))
    chosen_targets = select_names("target", targets, tuple(TARGETS))
    for name in chosen_targets if targets else ():
        check_precisions(name, precisions)
    parts = tuple(name for name, subject in known_subjects.items() if not subject.whole)
    components = select_names("component", components, tuple(known_subjects)) if components else parts
    strategies = select_names("strategy", strategies, tuple(STRATEGIES))
    if TINY in scales:
        raise HarnessError(
            f"The scale {TINY} has other widths than the published model, and proves nothing about it: "
            f"take the scale {' or '.join(Scale)}."
        )
    scales = select_names("scale", scales, tuple(scale.value for scale in Scale))
    frontends = select_names("frontend", frontends, tuple(FRONTENDS))
    weights = select_names("weights", weights, WEIGHTS)
    possible = (
        Case(component, strategy, target, scale, seed, precision, frontend, distribution)
        for target in chosen_targets
        for scale in scales
        for precision in precisions
        for component in components
        if precision in TARGETS[target].precisions and precision in known_subjects[component].precisions
        for distribution in weights
        if distribution in known_subjects[component].weights
        for frontend in frontends
        for strategy in strategies_of(component, frontend)
        if strategy in strategies
    )
    cases = tuple(case for case in possible if not known_subjects[case.component].symbolic or takes_symbolic_axes(case))
    if not cases:
        raise _no_case_error(components, strategies, precisions, frontends, weights)
    return cases


def _no_case_error(
    components: Sequence[str],
    strategies: Sequence[str],
    precisions: Sequence[str],
    frontends: Sequence[str],
    weights: Sequence[str],
) -> HarnessError:
    """Returns the error that says which of the names rule out all cases."""
    chosen = [subjects()[name] for name in components]
    names = ", ".join(components)
    judged_precisions = dict.fromkeys(name for subject in chosen for name in subject.precisions)
    if judged_precisions.keys().isdisjoint(precisions):
        return HarnessError(
            f"No case to run: {names} is judged in {', '.join(judged_precisions)} only, "
            f"not in {', '.join(precisions)}: give another --precision."
        )
    if not any(distribution in subject.weights for subject in chosen for distribution in weights):
        return HarnessError(
            f"No case to run: {names} has seeded weights or those of a checkpoint, "
            f"not {', '.join(weights)}: leave out --weights, or name a component."
        )
    if symbolic := next((subject.name for subject in chosen if subject.symbolic), ""):
        return HarnessError(
            f"No case to run: {symbolic} has inputs with symbolic axes, which take {describe_symbolic_support()}: "
            "give another --target, --frontend or --strategy."
        )
    applying = dict.fromkeys(
        name for part in components for frontend in frontends for name in strategies_of(part, frontend)
    )
    return HarnessError(
        f"No case to run: {names} through {', '.join(frontends)} takes only "
        f"--strategy {' or '.join(applying)}, not {', '.join(strategies)}."
    )
