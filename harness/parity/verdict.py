"""Judges outputs one by one: name and structure, shape, dtype, NaN/Inf mask, then values, never by correlation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from harness.core.expectations import Expectation
from harness.core.outcome import METRICS, Verdict, VerdictKind
from harness.core.program import Array
from harness.parity import metrics
from harness.parity.references import Reference

MAX_R_RMS = 1.5
"""Limit of the strict gate on r_rms, the rms error against float64 divided by PyTorch's own.

If PyTorch happens to be exact (constants, copies), the floor of 4 fp32 roundings replaces its error. The gate then
means "within six roundings of the oracle, in rms" and not "exact".
"""
MAX_R_INF = 5.0
"""Limit of the strict gate on r_inf, the largest error against float64 divided by PyTorch's own.

It detects single elements that are as close to PyTorch as the gate requires and still far from rounding.
"""
ORACLE_R_RMS = 2.0
"""Limit of the oracle verdict on r_rms."""
ORACLE_R_INF = 5.0
"""Limit of the oracle verdict on r_inf."""


def judge(
    actual: Mapping[str, Array],
    reference: Reference,
    *,
    expectation: Expectation | None = None,
    max_r_rms: float = MAX_R_RMS,
    by_oracle: bool = False,
    ill_conditioned: bool = False,
) -> tuple[Verdict, ...]:
    """Judges every output of one case.

    Args:
        actual: The compiled model's outputs by name.
        reference: PyTorch's outputs. If an output of the second run differs bitwise (all NaNs are equal), it is not
            judgeable.
        expectation: If it allows the oracle verdict, outputs outside the strict gate may pass on r_rms ≤ 2, r_inf ≤ 5.
        by_oracle: Whether every output may pass by the oracle, as in half precision.
        ill_conditioned: Whether an output may pass by the oracle if PyTorch itself is outside the strict gate against
            float64.
        max_r_rms: Limit on r_rms for strict outputs; see `MAX_R_RMS`. `math.inf` disables the limits on r_rms and
            r_inf.

    Returns:
        One verdict per output of the reference, in its order, then one per output that the reference lacks.

    Raises:
        ValueError: The reference has no output, so nothing would be judged.
    """
    if not reference.first:
        raise ValueError("the reference has no output, so there is nothing to judge")
    verdicts = []
    for name, expected in reference.first.items():
        if name not in actual:
            output = f"{expected.dtype.name} {list(expected.shape)}"
            reason = f"missing: the reference has this output, {output}, the compiled model does not"
            verdicts.append(_failed_verdict(name, (), "", 0, expected.size, reason))
            continue
        exact, second = reference.exact.get(name), reference.again.get(name)
        allowed = by_oracle or (expectation is not None and expectation.allows_oracle(name))
        verdicts.append(_judge_output(name, actual[name], expected, exact, second, allowed, ill_conditioned, max_r_rms))
    extra = "the compiled model returned an output that the reference does not have"
    verdicts += [
        unmeasured_verdict(name, array, extra) for name, array in actual.items() if name not in reference.first
    ]
    return tuple(verdicts)


def judge_by_gate(actual: Mapping[str, Array], reference: Reference) -> tuple[Verdict, ...]:
    """Judges outputs by the strict gate and two runs of PyTorch; the verdicts have no r_rms and no r_inf."""
    exact = {name: array.astype(np.float64) for name, array in reference.first.items()}
    verdicts = judge(actual, replace(reference, exact=exact), max_r_rms=math.inf)
    return tuple(replace(verdict, r_rms=math.nan, r_inf=math.nan) for verdict in verdicts)


def _judge_output(
    name: str,
    a: Array,
    r: Array,
    o: Array | None,
    second: Array | None,
    oracle_allowed: bool,
    ill_conditioned: bool,
    max_r_rms: float,
) -> Verdict:
    if a.shape != r.shape:
        return unmeasured_verdict(name, a, f"shape {list(a.shape)} instead of {list(r.shape)}")
    if a.dtype != r.dtype:
        return _measure(name, a, r, o, VerdictKind.FAILED, f"dtype {a.dtype.name} instead of {r.dtype.name}", a.size)
    problem = _reference_problem(r, o, second)
    if problem:
        return _measure(name, a, r, o, VerdictKind.NOT_JUDGEABLE, problem)
    if metrics.is_exact(r.dtype):
        unequal = metrics.unequal(a, r)
        reason = f"{unequal} of {a.size} elements differ, {r.dtype.name} must be equal" if unequal else ""
        return _measure(name, a, r, o, VerdictKind.FAILED if unequal else VerdictKind.STRICT, reason, unequal)
    mismatches = metrics.mask_mismatches(a, r)
    if mismatches:
        reason = f"NaN/Inf mask differs at {mismatches} of {a.size} elements"
        return _measure(name, a, r, o, VerdictKind.FAILED, reason)
    torch_outside = metrics.difference(r, o).outside if ill_conditioned and o is not None else 0
    return _judge_values(_measure(name, a, r, o, VerdictKind.STRICT, ""), oracle_allowed, max_r_rms, torch_outside)


def _judge_values(verdict: Verdict, oracle_allowed: bool, max_r_rms: float, torch_outside: int) -> Verdict:
    """Judges an output by its metrics alone, after everything else was found right.

    `torch_outside` is the number of elements of PyTorch itself outside the strict gate against float64. If it is not 0,
    the oracle may decide.
    """
    if verdict.elements == 0:
        return verdict
    if verdict.outside:
        reason = (
            f"{verdict.outside} of {verdict.elements} elements outside 1e-5 + 1e-5·|torch|; "
            f"{verdict.required_tolerance:.2g} would have passed"
        )
    elif not verdict.r_rms <= max_r_rms:
        reason = (
            f"inside the strict gate, but r_rms {verdict.r_rms:.3g} is above {max_r_rms:g}: "
            "less accurate than PyTorch against float64"
        )
    elif math.isfinite(max_r_rms) and verdict.r_inf > MAX_R_INF:
        reason = (
            f"inside the strict gate, but r_inf {verdict.r_inf:.3g} is above {MAX_R_INF:g}: "
            "an element is far less accurate than PyTorch's worst against float64"
        )
    else:
        return verdict
    if torch_outside:
        reason += f"; against float64 PyTorch itself has {torch_outside} outside"
    if oracle_allowed or torch_outside:
        if verdict.r_rms <= ORACLE_R_RMS and verdict.r_inf <= ORACLE_R_INF:
            return replace(verdict, kind=VerdictKind.ORACLE, reason=reason)
        reason += (
            f"; the oracle verdict needs r_rms ≤ {ORACLE_R_RMS:g} and r_inf ≤ {ORACLE_R_INF:g}, "
            f"got {verdict.r_rms:.3g} and {verdict.r_inf:.3g}"
        )
    return replace(verdict, kind=VerdictKind.FAILED, reason=reason)


def _reference_problem(r: Array, o: Array | None, second: Array | None) -> str:
    """Returns why this reference cannot be used to judge; empty if it can."""
    if second is None or second.shape != r.shape or second.dtype != r.dtype:
        return "the second run of the reference has another structure than the first"
    if second is not r:
        unstable = metrics.bitwise_different(r, second)
        if unstable:
            return f"the reference differs from its own second run at {unstable} of {r.size} elements"
    if o is None:
        return "there is no oracle for this output"
    if o.shape != r.shape:
        return f"the oracle has shape {list(o.shape)}, the reference {list(r.shape)}"
    if metrics.is_exact(r.dtype):
        return "" if metrics.is_exact(o.dtype) else f"the oracle is {o.dtype.name}, the reference {r.dtype.name}"
    if o.dtype not in (np.dtype(np.float64), np.dtype(np.complex128)):
        return f"the oracle is {o.dtype.name} instead of float64"
    if r.size and not metrics.any_finite(r):
        return "the reference has no finite element"
    overflow = metrics.mask_mismatches(r, o)
    return f"the reference and its oracle disagree on NaN/Inf at {overflow} of {r.size} elements" if overflow else ""


def _measure(
    name: str, a: Array, r: Array, o: Array | None, kind: VerdictKind, reason: str, outside: int | None = None
) -> Verdict:
    """Measures every metric that applies to two arrays of equal shape and any dtype."""
    measured = asdict(metrics.difference(a, r))
    if outside is not None:
        measured["outside"] = outside
    ratio = metrics.OracleRatio(math.nan, math.nan)
    if metrics.is_exact(r.dtype):
        measured |= {"required_tolerance": math.nan, "sqnr_db": math.nan}
    elif o is not None and o.shape == a.shape and o.dtype.kind in "fc":
        ratio = metrics.oracle_ratio(a, r, o)
    return Verdict(name, tuple(a.shape), a.dtype.name, **measured, **asdict(ratio), kind=kind, reason=reason)


def unmeasured_verdict(name: str, a: Array, reason: str) -> Verdict:
    """Returns the verdict `failed` for an array that was compared with nothing."""
    return _failed_verdict(name, tuple(a.shape), a.dtype.name, a.size, a.size, reason)


def _failed_verdict(name: str, shape: tuple[int, ...], dtype: str, elements: int, outside: int, reason: str) -> Verdict:
    """Returns the verdict `failed` without metrics; every element counts as outside, at least one."""
    unknown: dict[str, Any] = dict.fromkeys(METRICS, math.nan)
    return Verdict(name, shape, dtype, elements, max(outside, 1), **unknown, kind=VerdictKind.FAILED, reason=reason)
