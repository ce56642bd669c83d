"""The search for a budget on errors that are known: the limit is held by what is measured, not by what is predicted."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.support.sentences import sentence
from harness.core.budget import Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.settings import SEEDED
from harness.verify.budget.measurement import Measurement
from harness.verify.budget.search import Log, Rates, Search
from harness.verify.budget.table import summary

pytestmark = pytest.mark.smoke

CASE = Case("box_head", "real", "llvm", precision="bf16")
RATES = Rates(100.0, 200.0)


class Bench:
    """Groups with errors; those of groups that are half together are also multiplied."""

    def __init__(self, errors: dict[str, float], correlated: float = 1.0, untouched: tuple[str, ...] = ()) -> None:
        self.groups, self.untouched, self.measured = tuple(errors), untouched, 0
        self._errors, self._correlated = errors, correlated

    def operations(self, group: str) -> int:
        return 10**9 * (1 + self.groups.index(group))

    def measure(self, half: Groups) -> Measurement:
        self.measured += 1
        error = math.hypot(0.001, *(self._errors[group] for group in half))
        return Measurement(tuple(sorted(half)), {"x": error * (self._correlated if len(half) > 1 else 1)})


def search(bench: Bench, folder: Path, conditions: str = "here", said: list[str] | None = None) -> Search:
    return Search(bench, Log(folder / "log.jsonl", conditions), RATES, ([] if said is None else said).append)


def test_the_fastest_choice_within_the_limit(tmp_path: Path) -> None:
    found = search(Bench({"a": 0.3, "b": 0.4, "c": 0.6}, untouched=("d",)), tmp_path).find(CASE, SEEDED, 0.55)
    assert found.budget.float32 == ("c",) and found.refused == 0 and found.untouched == ("d",)
    assert found.chosen.measured == pytest.approx(0.5, rel=1e-5) == found.chosen.predicted
    # 3, 1 and 2 times 10⁹ operations, at 100 and at 200 times 10⁹ a second.
    assert found.chosen.seconds == pytest.approx(0.03 + 0.005 + 0.01)
    assert (found.front[0].seconds, found.front[-1].seconds) == pytest.approx((0.06, 0.03))


@pytest.mark.parametrize("gains", [None, True, False])
def test_a_cpu_that_gains_nothing_is_named(tmp_path: Path, gains: bool | None) -> None:
    found = search(Bench({"a": 0.3}), tmp_path).find(CASE, SEEDED, 0.5)
    assert ("skylake" in summary(replace(found, cpu="skylake", gains=gains))) is (gains is False)


def test_a_limit_above_all_keeps_nothing(tmp_path: Path) -> None:
    assert search(Bench({"a": 0.3, "b": 0.4}), tmp_path).find(CASE, SEEDED, 0.6).budget.float32 == ()


@pytest.mark.parametrize("correlated", [1.05, 1.5, 10.0])
def test_what_was_predicted_too_low_goes_back_to_float32(tmp_path: Path, correlated: float) -> None:
    errors = {"a": 0.3, "b": 0.4, "c": 0.41, "d": 0.42}
    found = search(Bench(errors, correlated), tmp_path).find(CASE, SEEDED, 0.6)
    assert found.refused > 0 and found.chosen.measured <= 0.6
    assert found.chosen.half > 0


def test_a_limit_below_fp32s_own_error_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=sentence("unreachable-limit", limit="0.0005", reason="0.001")):
        search(Bench({"a": 0.3}), tmp_path).find(CASE, SEEDED, 0.0005)


def test_an_output_that_fails_in_float32_is_told(tmp_path: Path) -> None:
    class Failing(Bench):
        def measure(self, half: Groups) -> Measurement:
            return Measurement(tuple(sorted(half)), {"x": 0.1}, "y: 3 of 4 elements are unequal")

    with pytest.raises(HarnessError, match=sentence("unreachable-limit", reason="y: 3 of 4")):
        search(Failing({"a": 0.3}), tmp_path).find(CASE, SEEDED, 0.5)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    errors = {"a": 0.3, "b": 0.4, "c": 0.6}
    bench, said = Bench(errors), []
    first = search(bench, tmp_path, said=said).find(CASE, SEEDED, 0.55)
    assert said[:5] == ["float32", "half precision", "group 1 of 3", "group 2 of 3", "group 3 of 3"]
    assert first.new_count == bench.measured == len(said) and first.reused_count == 0
    lines = (tmp_path / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text("".join(lines[:3]))
    rest = Bench(errors)
    again = search(rest, tmp_path).find(CASE, SEEDED, 0.55)
    assert (again.reused_count, again.new_count, rest.measured) == (3, len(lines) - 3, len(lines) - 3)
    assert again.to_json() == first.to_json()
    assert (tmp_path / "log.jsonl").read_text() == "".join(lines)
    assert search(Bench(errors), tmp_path, "elsewhere").find(CASE, SEEDED, 0.55).reused_count == 0


def test_a_damaged_log_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n")
    with pytest.raises(HarnessError, match=sentence("damaged-log", file="log.jsonl", number=1)):
        Log(tmp_path / "log.jsonl", "here")
