"""The judge, tested like everything else: faults are injected, each must be caught at the output where it was put."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict, VerdictKind
from harness.parity.references import Reference
from harness.parity.verdict import MAX_R_RMS, judge

Arrays = dict[str, np.ndarray]


def model(seed: int, dtype: type[np.floating], blocked: bool = False) -> Arrays:
    """A small network with outputs of every kind; `blocked` sums in another order, as another compiler would."""
    rng = np.random.default_rng(seed)

    def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        if not blocked:
            return x @ weight
        parts = np.split(np.arange(weight.shape[0]), 8)
        return np.sum([x[:, part] @ weight[part] for part in parts], axis=0, dtype=dtype)

    inputs = rng.normal(size=(120, 256)).astype(np.float32).astype(dtype)
    weights = [rng.normal(size=(256, 256), scale=1 / 16).astype(np.float32).astype(dtype) for _ in range(3)]
    x = inputs
    for weight in weights:
        x = np.tanh(linear(x, weight)) * dtype(2)
    return {
        "features": x[:, :144].reshape(1, 120, 12, 12),
        "position": x[:, 100:244].reshape(1, 120, 12, 12),
        "boxes": (dtype(1) / (dtype(1) + np.exp(-x[:, :4]))).reshape(1, 120, 4),
        "logits": x[:, 5].reshape(1, 120),
        "faint": x[:, :8] * dtype(1e-7),
        "ids": np.random.default_rng(seed).integers(0, 50, size=(2, 9)),
        "mask": np.random.default_rng(seed).integers(0, 2, size=(2, 9)).astype(bool),
    }


ORACLE, REFERENCE, COMPILED = model(0, np.float64), model(0, np.float32), model(0, np.float32, blocked=True)
PYTORCH = Reference.from_run(REFERENCE, ORACLE)
STALE = model(1, np.float32, blocked=True)
FLOATS = ("features", "position", "boxes", "logits", "faint")
EXACT = ("ids", "mask")


def failed(verdicts: tuple[Verdict, ...]) -> set[str]:
    return {verdict.name for verdict in verdicts if verdict.kind is not VerdictKind.STRICT}


def element(array: np.ndarray) -> tuple[int, ...]:
    """One position, not at an edge where the shape has an inside."""
    return tuple(2 * side // 3 for side in array.shape)


def one_element(array: np.ndarray) -> np.ndarray:
    """Just outside the gate for values of ordinary size; for tiny ones as large as they are."""
    place = element(array)
    array[place] += 1.2e-5 * (1 + abs(array[place])) if np.abs(array).max() > 1e-3 else 1e-7
    return array


def one_column(array: np.ndarray) -> np.ndarray:
    array[..., -1] = array[..., 0]
    return array


def one_special(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def inject(array: np.ndarray) -> np.ndarray:
        array[element(array)] = value
        return array

    return inject


def tf32(array: np.ndarray) -> np.ndarray:
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def one_exact_element(array: np.ndarray) -> np.ndarray:
    place = element(array)
    array[place] = ~array[place] if array.dtype == bool else array[place] + 1
    return array


FLOAT_FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one element": one_element,
    "one wrong column": one_column,
    "scale 1.001": lambda x: x * np.float32(1.001),
    "offset 1e-3": lambda x: x + np.float32(1e-3),
    "sign": lambda x: -x,
    "all zeros": np.zeros_like,
    "bf16 rounding": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    "fp16 rounding": lambda x: (x * np.float32(2**12)).astype(np.float16).astype(np.float32) / np.float32(2**12),
    "tf32 truncation": tf32,
    "shifted by one": lambda x: np.roll(x, 1, axis=-1),
    "rows in reverse": lambda x: x[..., ::-1],
    "NaN": one_special(math.nan),
    "inf": one_special(math.inf),
    "-inf": one_special(-math.inf),
    "float64": lambda x: x.astype(np.float64),
    "float16": lambda x: x.astype(np.float16),
    "flat shape": lambda x: x.reshape(-1),
    "shape with another dimension": lambda x: x[None],
    "one row short": lambda x: x[..., :-1],
}
EXACT_FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one element": one_exact_element,
    "shifted by one": lambda x: np.roll(x, 1, axis=-1),
    "all zeros": np.zeros_like,
    "other integer": lambda x: x.astype(np.int32),
    "as float": lambda x: x.astype(np.float32),
    "transposed": lambda x: x.T,
}


def faults() -> Iterator[object]:
    for name in FLOATS:
        for fault, inject in FLOAT_FAULTS.items():
            yield pytest.param(name, inject, id=f"{fault} in {name}")
    for name in EXACT:
        for fault, inject in EXACT_FAULTS.items():
            yield pytest.param(name, inject, id=f"{fault} in {name}")


def test_a_faithful_recomputation_is_strict_everywhere():
    verdicts = judge(COMPILED, Reference(REFERENCE, model(0, np.float32), ORACLE))
    assert [verdict.name for verdict in verdicts] == list(REFERENCE)
    assert failed(verdicts) == set()
    assert not np.array_equal(COMPILED["features"], REFERENCE["features"]), (
        "the recomputation rounds like the reference"
    )
    assert all(verdict.reason == "" for verdict in verdicts)


@pytest.mark.parametrize(("name", "inject"), list(faults()))
def test_a_fault_is_caught_where_it_was_put_and_nowhere_else(name, inject):
    faulty = {**COMPILED, name: inject(COMPILED[name].copy())}
    verdicts = judge(faulty, PYTORCH)
    assert failed(verdicts) == {name}
    (caught,) = (verdict for verdict in verdicts if verdict.name == name)
    assert caught.kind is VerdictKind.FAILED
    assert caught.reason


@pytest.mark.parametrize("name", REFERENCE)
def test_a_stale_buffer_is_caught(name):
    """The output still holds what another input produced."""
    assert failed(judge({**COMPILED, name: STALE[name]}, PYTORCH)) == {name}


@pytest.mark.parametrize("one", REFERENCE)
@pytest.mark.parametrize("other", REFERENCE)
def test_swapped_outputs_are_caught_at_both(one, other):
    swapped = {**COMPILED, one: COMPILED[other], other: COMPILED[one]}
    assert failed(judge(swapped, PYTORCH)) == ({one, other} if one != other else set())


@pytest.mark.parametrize("name", ["features", "position"])
def test_a_transposition_that_keeps_the_shape_is_caught(name):
    assert failed(judge({**COMPILED, name: COMPILED[name].swapaxes(2, 3)}, PYTORCH)) == {name}


@pytest.mark.parametrize("name", REFERENCE)
def test_a_missing_output_is_caught(name):
    verdicts = judge({key: array for key, array in COMPILED.items() if key != name}, PYTORCH)
    assert failed(verdicts) == {name}
    (missing,) = (verdict for verdict in verdicts if verdict.name == name)
    assert "missing" in missing.reason
    assert missing.outside == REFERENCE[name].size


def test_an_extra_output_is_caught():
    verdicts = judge({**COMPILED, "more": np.zeros(3, np.float32)}, PYTORCH)
    assert failed(verdicts) == {"more"}
    assert [verdict.name for verdict in verdicts] == [*REFERENCE, "more"]


def test_a_reference_without_outputs_cannot_be_passed():
    with pytest.raises(ValueError, match="no output"):
        judge({}, Reference({}, {}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.reshape(-1).astype(np.float16) * np.float16(math.nan), "shape"),
        (lambda x: x.astype(np.float16) * np.float16(math.nan), "dtype"),
        (one_special(math.nan), "NaN/Inf mask"),
        (lambda x: x + np.float32(1), "outside"),
    ],
)
def test_the_first_difference_in_the_order_of_the_ladder_is_named(change, reason):
    verdicts = judge({**COMPILED, "features": change(COMPILED["features"].copy())}, PYTORCH)
    assert reason in verdicts[0].reason


def test_a_failed_output_says_how_far_it_is():
    verdict = judge({**COMPILED, "boxes": COMPILED["boxes"] + np.float32(1e-3)}, PYTORCH)[2]
    assert verdict.outside == verdict.elements == 480
    assert verdict.max_abs == pytest.approx(1e-3, rel=1e-2)
    assert 5e-4 < verdict.required_tolerance < 1e-3
    assert verdict.r_rms > 1000


# --- references that cannot be trusted ---


@pytest.mark.parametrize("name", REFERENCE)
def test_a_reference_that_differs_from_itself_is_not_judgeable(name):
    again = dict(REFERENCE)
    again[name] = again[name].copy()
    flat = again[name].reshape(-1)
    flat[7] = np.nextafter(flat[7], np.float32(9)) if name in FLOATS else not flat[7]
    verdicts = judge(COMPILED, Reference(REFERENCE, again, ORACLE))
    assert {v.name: v.kind for v in verdicts if v.kind is not VerdictKind.STRICT} == {name: VerdictKind.NOT_JUDGEABLE}


def test_a_second_run_with_the_same_nans_is_the_same():
    r = np.array([1, math.nan, -math.inf], np.float32)
    (verdict,) = judge({"x": r.copy()}, Reference({"x": r}, {"x": r.copy()}, {"x": r.astype(np.float64)}))
    assert verdict.kind is VerdictKind.STRICT


@pytest.mark.parametrize(
    ("reference", "oracle", "reason"),
    [
        ([1, 2], None, "no oracle"),
        ([1, 2], np.zeros(3), "shape"),
        ([1, 2], np.zeros(2, np.float32), "instead of float64"),
        ([math.nan, math.nan], np.full(2, math.nan), "no finite element"),
        ([math.inf, 1], np.ones(2), "disagree"),
        ([1, 1], np.array([math.nan, 1]), "disagree"),
    ],
)
def test_a_reference_or_oracle_that_is_no_measure_is_not_judgeable(reference, oracle, reason):
    r = np.array(reference, np.float32)
    (verdict,) = judge({"x": r.copy()}, Reference.from_run({"x": r}, {} if oracle is None else {"x": oracle}))
    assert verdict.kind is VerdictKind.NOT_JUDGEABLE
    assert reason in verdict.reason


def test_a_missing_second_run_of_one_output_is_not_judgeable():
    again = {name: array for name, array in REFERENCE.items() if name != "boxes"}
    assert failed(judge(COMPILED, Reference(REFERENCE, again, ORACLE))) == {"boxes"}


# --- accuracy against float64: r_rms is a part of the strict gate ---


def noisy(error: float, size: int = 4000, scale: float = 1.0, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(7)
    o = rng.uniform(1, 2, size) * scale
    noise = np.random.default_rng(seed).choice([-1.0, 1.0], size)
    return {"x": o + error * noise}


def judged(a: Arrays, r: Arrays, o: Arrays, **options: object) -> Verdict:
    narrow = [{name: array.astype(np.float32) for name, array in arrays.items()} for arrays in (a, r)]
    (verdict,) = judge(narrow[0], Reference.from_run(narrow[1], o), **options)
    return verdict


def test_a_strict_output_that_is_much_less_accurate_than_pytorch_fails():
    o, r, a = noisy(0), noisy(1e-6), noisy(3e-6, seed=1)
    verdict = judged(a, r, o)
    assert verdict.outside == 0
    assert verdict.kind is VerdictKind.FAILED
    assert "r_rms" in verdict.reason
    assert verdict.r_rms == pytest.approx(3, rel=0.05)
    assert judged(a, r, o, max_r_rms=math.inf).kind is VerdictKind.STRICT
    assert judged(noisy(MAX_R_RMS * 0.95e-6, seed=1), r, o).kind is VerdictKind.STRICT


def test_a_strict_output_with_one_element_that_is_no_rounding_fails():
    o, r, a = noisy(0), noisy(1e-7), noisy(1e-7, seed=1)
    assert judged(a, r, o).kind is VerdictKind.STRICT
    a["x"][17] += 9e-6
    verdict = judged(a, r, o)
    assert verdict.outside == 0
    assert verdict.r_rms < MAX_R_RMS
    assert verdict.kind is VerdictKind.FAILED
    assert "r_inf" in verdict.reason
    assert judged(a, r, o, max_r_rms=math.inf).kind is VerdictKind.STRICT


def test_where_pytorch_is_exact_a_few_roundings_are_allowed_and_no_more():
    eps = float(np.finfo(np.float32).eps)
    rng = np.random.default_rng(3)
    exact = {"x": rng.integers(1024, 2048, 500) / 1024}
    wide = {"x": exact["x"] * (1 + 4 * eps)}
    assert judged(wide, exact, exact).kind is VerdictKind.STRICT
    assert judged({"x": exact["x"] * (1 + 8 * eps)}, exact, exact).kind is VerdictKind.FAILED


# --- the oracle verdict ---


def allows(*outputs: str) -> Expectation:
    return Expectation(("c",), ("*",), ("*",), ("*",), why="large activations", outputs=outputs)


LARGE = {"o": noisy(0, scale=280), "r": noisy(8e-3, scale=280), "a": noisy(8e-3, scale=280, seed=1)}


def test_the_oracle_verdict_is_given_only_to_those_who_may_have_it():
    arguments = LARGE["a"], LARGE["r"], LARGE["o"]
    assert judged(*arguments).kind is VerdictKind.FAILED
    verdict = judged(*arguments, expectation=allows())
    assert verdict.kind is VerdictKind.ORACLE
    assert "outside" in verdict.reason
    assert judged(*arguments, expectation=allows("x")).kind is VerdictKind.ORACLE
    assert judged(*arguments, expectation=allows("y")).kind is VerdictKind.FAILED


def test_a_predicted_failure_is_no_permission():
    from harness.core.outcome import Stage, Status

    expectation = Expectation(("c",), ("*",), ("*",), ("*",), why="", status=Status.FAILED, stage=Stage.JUDGE)
    assert judged(LARGE["a"], LARGE["r"], LARGE["o"], expectation=expectation).kind is VerdictKind.FAILED


@pytest.mark.parametrize("factor", [2.2, 10])
def test_the_oracle_verdict_has_a_limit_on_rms(factor):
    a = noisy(8e-3 * factor, scale=280, seed=1)
    verdict = judged(a, LARGE["r"], LARGE["o"], expectation=allows())
    assert verdict.kind is VerdictKind.FAILED
    assert "oracle verdict needs" in verdict.reason


def test_the_oracle_verdict_has_a_limit_on_a_single_element():
    a = {"x": LARGE["a"]["x"].copy()}
    a["x"][17] = LARGE["o"]["x"][17] + 5.5 * 8e-3
    verdict = judged(a, LARGE["r"], LARGE["o"], expectation=allows())
    assert verdict.r_rms < 2
    assert verdict.kind is VerdictKind.FAILED


def test_where_pytorch_itself_leaves_the_gate_strained_weights_let_the_oracle_decide():
    verdict = judged(LARGE["a"], LARGE["r"], LARGE["o"], ill_conditioned=True)
    assert verdict.kind is VerdictKind.ORACLE
    assert "against float64 PyTorch itself has 4000 outside" in verdict.reason
    worse = judged(noisy(8e-3 * 2.2, scale=280, seed=1), LARGE["r"], LARGE["o"], ill_conditioned=True)
    assert worse.kind is VerdictKind.FAILED
    assert "oracle verdict needs" in worse.reason


def test_where_pytorch_stays_in_the_gate_strained_weights_permit_nothing():
    o, r, a = noisy(0), noisy(1.9e-5), noisy(1.9e-5, seed=1)  # r_rms 1, and their difference is twice the error
    verdict = judged(a, r, o, ill_conditioned=True)
    assert verdict.outside > 0
    assert verdict.kind is VerdictKind.FAILED
    assert "PyTorch itself" not in verdict.reason


def test_strict_stays_strict_where_the_oracle_could_judge():
    assert failed(judge(COMPILED, PYTORCH, expectation=allows())) == set()


@pytest.mark.parametrize("fault", ["NaN", "float64", "flat shape", "shifted by one", "bf16 rounding", "all zeros"])
@pytest.mark.parametrize("name", FLOATS)
def test_the_oracle_verdict_forgives_no_fault(name, fault):
    faulty = {**COMPILED, name: FLOAT_FAULTS[fault](COMPILED[name].copy())}
    verdicts = judge(faulty, PYTORCH, expectation=allows())
    assert {v.name for v in verdicts if v.kind is VerdictKind.FAILED} == {name}


# --- laws ---


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_side=5), elements=st.floats(width=32)))
def test_a_thing_is_itself(x):
    (verdict,) = judge({"x": x.copy()}, Reference({"x": x}, {"x": x.copy()}, {"x": x.astype(np.float64)}))
    assert verdict.kind is (VerdictKind.STRICT if np.isfinite(x).any() else VerdictKind.NOT_JUDGEABLE)
    assert verdict.outside == 0


EXACT_TYPES = st.sampled_from([np.int64, np.int32, np.uint8, np.bool_])


@given(hnp.arrays(EXACT_TYPES, hnp.array_shapes(min_dims=0, max_side=5)), st.data())
def test_integers_are_equal_or_wrong(x, data):
    assert judge({"x": x.copy()}, Reference.from_run({"x": x}, {"x": x}))[0].kind is VerdictKind.STRICT
    other = x.copy()
    place = data.draw(st.tuples(*(st.integers(0, side - 1) for side in x.shape)))
    other[place] = not x[place]
    if other[place] != x[place]:
        assert judge({"x": other}, Reference.from_run({"x": x}, {"x": x}))[0].kind is VerdictKind.FAILED


def test_an_empty_output_is_strict_if_the_reference_is_empty_too():
    empty = np.zeros((0, 256), np.float32)
    assert (
        judge({"x": empty}, Reference.from_run({"x": empty.copy()}, {"x": empty.astype(np.float64)}))[0].kind
        is VerdictKind.STRICT
    )
    row = np.zeros((1, 256), np.float32)
    assert (
        judge({"x": empty}, Reference.from_run({"x": row}, {"x": row.astype(np.float64)}))[0].kind is VerdictKind.FAILED
    )
