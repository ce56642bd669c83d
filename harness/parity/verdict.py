"""The judge: name and structure, shape, dtype, NaN/Inf mask, then values — per output, never by correlation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.expectations import Expectation
from harness.core.outcome import Verdict, VerdictKind
from harness.parity import metrics

Array = npt.NDArray[Any]

MAX_R_RMS = 1.5
"""Part of the strict gate: the limit on r_rms, the rms error against float64 in units of PyTorch's own.

Where PyTorch happens to be exact (constants, copies), the floor of 4 fp32 roundings stands in for its error, so there
the gate means "within six roundings of the oracle, in rms" and not "exact".
"""
MAX_R_INF = 5.0
"""Part of the strict gate: the limit on r_inf, the largest error against float64 in units of PyTorch's own.

It sees single elements that are as close to PyTorch as the gate asks and still far from rounding.
"""
ORACLE_R_RMS = 2.0
"""Limit of the oracle verdict on r_rms."""
ORACLE_R_INF = 5.0
"""Limit of the oracle verdict on r_inf."""


def judge(
    actual: Mapping[str, Array],
    reference: Mapping[str, Array],
    oracle: Mapping[str, Array],
    *,
    reference_again: Mapping[str, Array] | None = None,
    expectation: Expectation | None = None,
    max_r_rms: float = MAX_R_RMS,
    by_oracle: bool = False,
    strained: bool = False,
) -> tuple[Verdict, ...]:
    """Judges every output of one case.

    Args:
        actual: What the compiled model returned, by output name.
        reference: PyTorch eager fp32 on the CPU; of a half-precision case, under autocast.
        oracle: PyTorch float64 for floating outputs (complex128 for complex); integers and booleans as they are.
        reference_again: A second run of the reference; where it differs bitwise (two NaNs are equal), the output is not
            judgeable.
        expectation: If it allows the oracle verdict, outputs outside the strict gate may pass on r_rms ≤ 2, r_inf ≤ 5.
        by_oracle: Whether every output may pass so, as in half precision.
        strained: Whether an output may pass so where PyTorch itself is outside the strict gate against float64.
        max_r_rms: Limit on r_rms for strict outputs; see `MAX_R_RMS`. `math.inf` leaves the strict gate alone, without
            a limit on r_inf either.

    Returns:
        One verdict per output of the reference, in its order, then one per output that the reference does not have.

    Raises:
        ValueError: If the reference has no output at all: nothing would be judged.
    """
    if not reference:
        raise ValueError("the reference has no output, so there is nothing to judge")
    verdicts = []
    for name, expected in reference.items():
        if name not in actual:
            verdicts.append(_missing(name, expected))
            continue
        again = expected if reference_again is None else reference_again.get(name)
        allowed = by_oracle or (expectation is not None and expectation.allows_oracle(name))
        verdicts.append(_judge_one(name, actual[name], expected, oracle.get(name), again, allowed, strained, max_r_rms))
    verdicts += [_extra(name, array) for name, array in actual.items() if name not in reference]
    return tuple(verdicts)


def judge_by_gate(
    actual: Mapping[str, Array], reference: Mapping[str, Array], again: Mapping[str, Array]
) -> tuple[Verdict, ...]:
    """Judges outputs by the strict gate alone, where there is no oracle; the verdicts have no r_rms and no r_inf.

    Args:
        actual: What the compiled model returned, by name.
        reference: PyTorch's outputs.
        again: PyTorch's outputs of a second run.
    """
    wide = {name: array.astype(np.float64) for name, array in reference.items()}
    gated = judge(actual, reference, wide, reference_again=again, max_r_rms=math.inf)
    return tuple(replace(verdict, r_rms=math.nan, r_inf=math.nan) for verdict in gated)


def _judge_one(
    name: str,
    a: Array,
    r: Array,
    o: Array | None,
    again: Array | None,
    oracle_allowed: bool,
    strained: bool,
    max_r_rms: float,
) -> Verdict:
    if a.shape != r.shape:
        return unmeasured(name, a, f"shape {list(a.shape)} instead of {list(r.shape)}")
    if a.dtype != r.dtype:
        return _measured(name, a, r, o, VerdictKind.FAILED, f"dtype {a.dtype.name} instead of {r.dtype.name}", a.size)
    problem = _reference_problem(r, o, again)
    if problem:
        return _measured(name, a, r, o, VerdictKind.NOT_JUDGEABLE, problem)
    if metrics.is_exact(r.dtype):
        wrong = metrics.unequal(a, r)
        reason = f"{wrong} of {a.size} elements differ, {r.dtype.name} must be equal" if wrong else ""
        return _measured(name, a, r, o, VerdictKind.FAILED if wrong else VerdictKind.STRICT, reason, wrong)
    mismatches = metrics.mask_mismatches(a, r)
    if mismatches:
        reason = f"NaN/Inf mask differs at {mismatches} of {a.size} elements"
        return _measured(name, a, r, o, VerdictKind.FAILED, reason)
    own = metrics.difference(r, o).outside if strained and o is not None else 0
    return _judge_values(_measured(name, a, r, o, VerdictKind.STRICT, ""), oracle_allowed, max_r_rms, own)


def _judge_values(measured: Verdict, oracle_allowed: bool, max_r_rms: float, own: int) -> Verdict:
    """Decides on the metrics alone: everything before the values is already right.

    Where `own`, elements of PyTorch itself that are outside the strict gate against float64, is not 0, the oracle may
    decide.
    """
    if measured.elements == 0:
        return measured
    if measured.outside:
        reason = (
            f"{measured.outside} of {measured.elements} elements outside 1e-5 + 1e-5·|torch|; "
            f"{measured.required_tolerance:.2g} would have passed"
        )
    elif not measured.r_rms <= max_r_rms:
        reason = (
            f"inside the strict gate, but r_rms {measured.r_rms:.3g} is above {max_r_rms:g}: "
            "less accurate than PyTorch against float64"
        )
    elif math.isfinite(max_r_rms) and measured.r_inf > MAX_R_INF:
        reason = (
            f"inside the strict gate, but r_inf {measured.r_inf:.3g} is above {MAX_R_INF:g}: "
            "an element is far less accurate than PyTorch's worst against float64"
        )
    else:
        return measured
    if own:
        reason += f"; against float64 PyTorch itself has {own} outside"
    if oracle_allowed or own:
        if measured.r_rms <= ORACLE_R_RMS and measured.r_inf <= ORACLE_R_INF:
            return replace(measured, kind=VerdictKind.ORACLE, reason=reason)
        reason += (
            f"; the oracle verdict needs r_rms ≤ {ORACLE_R_RMS:g} and r_inf ≤ {ORACLE_R_INF:g}, "
            f"got {measured.r_rms:.3g} and {measured.r_inf:.3g}"
        )
    return replace(measured, kind=VerdictKind.FAILED, reason=reason)


def _reference_problem(r: Array, o: Array | None, again: Array | None) -> str:
    """Returns why nothing can be judged against this reference; empty if it can."""
    if again is None or again.shape != r.shape or again.dtype != r.dtype:
        return "the second run of the reference has another structure than the first"
    if again is not r:
        unstable = metrics.bitwise_different(r, again)
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


def _measured(
    name: str, a: Array, r: Array, o: Array | None, kind: VerdictKind, reason: str, outside: int | None = None
) -> Verdict:
    """Measures every metric that applies to two arrays of equal shape and any dtype."""
    d = metrics.difference(a, r)
    exact = metrics.is_exact(r.dtype)
    ratio = metrics.OracleRatio(math.nan, math.nan)
    if o is not None and o.shape == a.shape and not exact and o.dtype.kind in "fc":
        ratio = metrics.oracle_ratio(a, r, o)
    return Verdict(
        name=name,
        shape=tuple(a.shape),
        dtype=a.dtype.name,
        elements=a.size,
        outside=d.outside if outside is None else outside,
        max_abs=d.max_abs,
        mean_abs=d.mean_abs,
        max_rel=d.max_rel,
        required_tolerance=math.nan if exact else d.required_tolerance,
        sqnr_db=math.nan if exact else d.sqnr_db,
        r_rms=ratio.r_rms,
        r_inf=ratio.r_inf,
        kind=kind,
        reason=reason,
    )


def unmeasured(name: str, a: Array, reason: str) -> Verdict:
    """Makes the verdict `failed` for an array that was compared with nothing."""
    return _without_metrics(name, tuple(a.shape), a.dtype.name, a.size, a.size, reason)


def _missing(name: str, r: Array) -> Verdict:
    reason = f"missing: the reference has this output, {r.dtype.name} {list(r.shape)}, the compiled model does not"
    return _without_metrics(name, (), "", 0, r.size, reason)


def _extra(name: str, a: Array) -> Verdict:
    return unmeasured(name, a, "the compiled model returned an output that the reference does not have")


def _without_metrics(
    name: str, shape: tuple[int, ...], dtype: str, elements: int, outside: int, reason: str
) -> Verdict:
    """Makes the verdict `failed` where no value could be compared: every element is outside, at least one."""
    return Verdict(
        name=name,
        shape=shape,
        dtype=dtype,
        elements=elements,
        outside=max(outside, 1),
        max_abs=math.nan,
        mean_abs=math.nan,
        max_rel=math.nan,
        required_tolerance=math.nan,
        sqnr_db=math.nan,
        r_rms=math.nan,
        r_inf=math.nan,
        kind=VerdictKind.FAILED,
        reason=reason,
    )
