"""The choice of groups: never over a limit, never slower than another choice within it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.examples import examples
from harness.verify.budget.choice import Contribution, choose, predict_errors

OUTPUTS = ("boxes", "logits")
squares = st.one_of(st.just(0.0), st.floats(1e-9, 1.0))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Contribution], dict[str, float]]:
    outputs = OUTPUTS[: draw(st.integers(1, 2))]
    contributions = [
        Contribution(f"layer.{n}", draw(st.floats(-1.0, 5.0)), {name: draw(squares) for name in outputs})
        for n in range(draw(st.integers(0, 7)))
    ]
    return contributions, {name: draw(st.floats(0.0, 3.0)) for name in outputs}


def used(chosen: Sequence[Contribution], output: str) -> float:
    return math.fsum(each.squares[output] for each in chosen)


def saved(chosen: Sequence[Contribution]) -> float:
    return math.fsum(each.saved for each in chosen)


@examples(60, deadline=None)
@given(problems())
def test_no_choice_within_the_limits_saves_more(problem: tuple[list[Contribution], dict[str, float]]) -> None:
    contributions, capacities = problem
    names = choose(contributions, capacities)
    chosen = [each for each in contributions if each.group in names]
    assert len(chosen) == len(names)
    assert all(used(chosen, output) <= capacity for output, capacity in capacities.items())
    assert all(each.saved > 0 for each in chosen), "leaving it out would be faster"
    possible = [
        subset
        for size in range(len(contributions) + 1)
        for subset in itertools.combinations(contributions, size)
        if all(used(subset, output) <= capacity for output, capacity in capacities.items())
    ]
    assert saved(chosen) == pytest.approx(max(map(saved, possible), default=0.0), rel=1e-6, abs=1e-12)


def test_many_alike_groups_are_chosen_in_seconds() -> None:
    """As many as a full vision transformer has, on a limit that a part of each kind exceeds by a little."""
    groups = [Contribution(f"{kind}.{n}", 1.0 + kind, {"x": 0.01 * (1 + kind)}) for kind in range(4) for n in range(40)]
    chosen = choose(groups, {"x": 1.005})
    assert saved([each for each in groups if each.group in chosen]) == pytest.approx(100.0)


def test_a_sum_at_the_limit_is_within_it_and_one_above_is_not() -> None:
    groups = [Contribution(name, 1.0, {"x": 0.1}) for name in "abc"]
    limit = math.fsum([0.1, 0.1])
    assert len(choose(groups, {"x": limit})) == 2
    assert len(choose(groups, {"x": math.nextafter(limit, 0)})) == 1


def test_squared_errors_add() -> None:
    assert predict_errors({"x": 3.0}, [Contribution("a", 1.0, {"x": 16.0})]) == {"x": 5.0}
