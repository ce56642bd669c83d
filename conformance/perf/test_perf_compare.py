"""Comparing two runs: what is a slowdown, and what is noise, a faster machine or too little to tell."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.case import Case
from harness.core.errors import HarnessError
from perf.compare import main
from perf.shifts import LEAST, Change, checked, compare_runs, read_run

seeds = st.integers(0, 2**32 - 1)
counts = st.integers(5, 40)
spreads = st.floats(0.0, 0.1)
medians = st.floats(1e-4, 60.0)


def rounds(seed: int, count: int, median: float, spread: float) -> list[float]:
    """Rounds around a median, the largest 1 + spread times it."""
    generator = random.Random(seed)
    return [median * (1 + spread) ** generator.uniform(-1, 1) for _ in range(count)]


def info(peak: float = 5e11, torch_version: str = "2", **sides: list[float]) -> dict[str, Any]:
    return {
        "sides": {name: {"seconds": seconds} for name, seconds in sides.items()},
        "peak_flops": peak,
        "versions": {"torch": torch_version},
    }


def change(before: dict[str, Any], after: dict[str, Any], side: str = "untuned") -> Change:
    return {c.side: c for c in compare_runs({"case": before}, {"case": after})}[side].shift.change


@given(seeds, counts, medians, spreads)
def test_a_run_does_not_differ_from_itself(seed: int, count: int, median: float, spread: float) -> None:
    run = info(torch=rounds(seed, count, 2 * median, spread), untuned=rounds(seed + 1, count, median, spread))
    assert change(run, run) is Change.NONE
    (_, ours) = compare_runs({"case": run}, {"case": run})
    assert ours.shift.ratio == pytest.approx(1) and ours.shift.low <= 1 <= ours.shift.high


@given(seeds, counts, counts, medians, spreads)
def test_half_as_much_again_is_slower(seed: int, count: int, again: int, median: float, spread: float) -> None:
    before = info(torch=rounds(seed, count, 2, 0.05), untuned=rounds(seed + 1, count, median, spread))
    after = info(torch=rounds(seed + 2, again, 2, 0.05), untuned=rounds(seed + 3, again, 1.5 * median, spread))
    assert change(before, after) is Change.SLOWER
    assert change(after, before) is Change.FASTER
    (_, ours) = compare_runs({"case": before}, {"case": after})
    assert ours.shift.low <= ours.shift.ratio <= ours.shift.high
    assert ours.is_slowdown


@given(seeds, counts, counts, spreads, st.floats(0.5, 2))
def test_the_other_way_round_is_the_opposite(seed: int, count: int, again: int, spread: float, factor: float) -> None:
    before = info(torch=rounds(seed, count, 2, spread), untuned=rounds(seed + 1, count, 1, spread))
    after = info(torch=rounds(seed + 2, again, 2, spread), untuned=rounds(seed + 3, again, factor, spread))
    opposite = {Change.SLOWER: Change.FASTER, Change.FASTER: Change.SLOWER}
    found = change(before, after)
    assert change(after, before) is opposite.get(found, found)
    forth, back = (compare_runs({"c": a}, {"c": b})[1].shift for a, b in ((before, after), (after, before)))
    assert forth.ratio * back.ratio == pytest.approx(1)
    assert forth.low * back.high == pytest.approx(1) and forth.high * back.low == pytest.approx(1)


@given(seeds, counts, spreads)
def test_rounds_of_one_distribution_do_not_differ(seed: int, count: int, spread: float) -> None:
    """Whatever the rounds, a shift within the spread of either run is none."""
    before = info(torch=[1.0] * count, untuned=rounds(seed, count, 1, spread))
    after = info(torch=[1.0] * count, untuned=rounds(seed + 1, count, 1, spread))
    shift = compare_runs({"c": before}, {"c": after})[1].shift
    if shift.change is not Change.NONE:
        assert abs(math.log(shift.ratio)) > math.log1p(LEAST)
        assert not shift.low <= 1 <= shift.high
    assert change(before, info(torch=[1.0] * count, untuned=before["sides"]["untuned"]["seconds"][::-1])) is Change.NONE


def test_noise_within_the_spread_is_no_difference() -> None:
    wide = [0.8, 0.9, 1.0, 1.1, 1.2] * 4
    shifted = [1.1 * seconds for seconds in wide]  # less than the spread of ±18 %, though the medians are 10 % apart
    constant = [1.0] * 20
    assert change(info(torch=constant, untuned=wide), info(torch=constant, untuned=shifted)) is Change.NONE
    narrow = [0.998, 0.999, 1.0, 1.001, 1.002] * 4
    shifted = [1.1 * seconds for seconds in narrow]
    assert change(info(torch=constant, untuned=narrow), info(torch=constant, untuned=shifted)) is Change.SLOWER


@given(seeds, counts, st.floats(0.3, 3))
def test_a_slower_machine_is_no_slower_program(seed: int, count: int, factor: float) -> None:
    torch, ours = rounds(seed, count, 2, 0.05), rounds(seed + 1, count, 1, 0.05)
    before = info(torch=torch, untuned=ours)
    after = info(peak=5e11 / factor, torch=[factor * s for s in torch], untuned=[factor * s for s in ours])
    assert change(before, after) is Change.NONE
    assert change(before, after, "torch") is Change.NONE


def test_another_pytorch_is_no_measure_of_the_machine() -> None:
    ours = [1.0, 1.001, 0.999, 1.0, 1.002]
    before = info(torch=ours, untuned=ours)
    after = info(torch_version="3", torch=[0.5 * s for s in ours], untuned=ours)
    assert change(before, after) is Change.NONE
    assert change(before, info(torch=[0.5 * s for s in ours], untuned=ours)) is Change.SLOWER


def test_few_rounds_tell_nothing() -> None:
    assert change(info(torch=[1.0] * 4, untuned=[1.0] * 4), info(torch=[1.0] * 4, untuned=[9.0] * 4)) is Change.UNKNOWN


def test_peers_are_shown_but_are_not_ours() -> None:
    before = info(torch=[1.0] * 5, untuned=[1.0] * 5, openvino=[1.0] * 5)
    after = info(torch=[1.0] * 5, untuned=[1.0] * 5, openvino=[2.0] * 5)
    found = {c.side: c for c in compare_runs({"case": before}, {"case": after})}
    peer = found["openvino"]
    assert peer.shift.change is Change.SLOWER and not peer.is_slowdown


def stored(path: Path, **benchmarks: dict[str, Any]) -> str:
    listed = [{"fullname": name, "extra_info": info} for name, info in benchmarks.items()]
    path.write_text(json.dumps({"benchmarks": listed}), encoding="utf-8")
    return str(path)


def test_stored_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = stored(tmp_path / "before.json", case=info(torch=[1.0] * 5, untuned=[1.0] * 5))
    after = stored(tmp_path / "after.json", case=info(torch=[1.0] * 5, untuned=[1.5] * 5))
    assert main([before, before]) == 0
    assert "nothing of ours is slower" in capsys.readouterr().out
    assert main([before, after]) == 1
    assert "slower: case, untuned, 1.50 times the time" in capsys.readouterr().out


def test_kernels_are_compared_too(tmp_path: Path) -> None:
    before = stored(tmp_path / "before.json", kernel={"tvm_seconds": [1.0] * 5, "torch_seconds": [2.0] * 5})
    after = stored(tmp_path / "after.json", kernel={"tvm_seconds": [1.5] * 5, "torch_seconds": [2.0] * 5})
    assert main([before, after]) == 1


def test_a_case_is_known_by_its_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, rounds = Case("vit", "real", "cuda", precision="fp16"), {"torch": [1.0] * 5, "untuned": [1.0] * 5}
    name = f"test_component[{case.id}]"
    fields = stored(tmp_path / "fields.json", **{name: info(**rounds) | {"case": case.to_json()}})
    seeded = stored(tmp_path / "seed.json", **{name: info(**rounds) | {"case": replace(case, seed=1).to_json()}})
    former = stored(tmp_path / "id.json", **{name: info(**rounds) | {"case": case.id}})
    assert main([fields, fields]) == 0
    assert main([seeded, fields]) == 2  # other weights, though the names are the same
    assert main([former, fields]) == 2
    assert "measure it again" in capsys.readouterr().err


def test_a_compressed_run_is_one_too(tmp_path: Path) -> None:
    before = Path(stored(tmp_path / "before.json", case=info(torch=[1.0] * 5, untuned=[1.0] * 5)))
    packed = tmp_path / "before.json.gz"
    packed.write_bytes(gzip.compress(before.read_bytes()))
    assert main([str(packed), str(before)]) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"benchmarks": 1}', '{"benchmarks": [1]}'])
def test_what_is_no_stored_run_is_a_sentence(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(text, encoding="utf-8")
    with pytest.raises(HarnessError, match=r"broken\.json"):
        read_run(broken)
    assert main([str(broken), str(broken)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_runs_without_a_common_case_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = stored(tmp_path / "one.json", one=info(torch=[1.0] * 5, untuned=[1.0] * 5))
    other = stored(tmp_path / "other.json", other=info(torch=[1.0] * 5, untuned=[1.0] * 5))
    assert main([one, other]) == 2
    assert "one.json has no rounds of any of these benchmarks" in capsys.readouterr().err
    assert main([one, str(tmp_path / "missing.json")]) == 2
    assert "missing.json: No such file" in capsys.readouterr().err
    with pytest.raises(HarnessError):
        checked([], "one.json")
