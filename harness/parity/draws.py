"""How large PyTorch's errors usually are where one run of it is luck.

The oracle verdict divides the error of compiled code by that of PyTorch. Over thousands of independent errors that is a
measurement; the error of one number is luck: of two normal errors of one size, the one is more than twice the other in
three of ten cases (1 - 2/π·atan 2). So PyTorch is run more than once, each time with inputs and weights that the
precision can hardly tell from the case's own, and measured against float64 with the very same ones: every run rounds
anew, and draws its error anew (Parker, Monte Carlo Arithmetic, 1997, perturbs operands so).

Half precision asks this of outputs of few numbers. In fp32 weights with outliers ask it of what fails otherwise: where
all numbers of an output follow from one token, a massive channel of this token makes one error of theirs. What one run
of compiled code fails even then is run as often as PyTorch is, and its usual error is divided by PyTorch's: a fault is
there in each of the runs, bad luck is not. Inputs and weights are moved further for that. Beside a logit of 300, of
which a unit in the last place is 3e-5, half a unit of what it is computed from is too little to round it anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.outcome import Verdict, VerdictKind
from harness.core.precision import Precision
from harness.core.program import Arrays, Output, Program, Trace
from harness.parity import metrics
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS

if TYPE_CHECKING:
    import torch

RunTrace = Callable[[Trace], Mapping[str, "npt.NDArray[Any]"]]
"""Runs the calls of a trace; arrays by the names of their outputs."""

Array = npt.NDArray[Any]

FEW = 64
"""An output of fewer numbers is judged by draws.

Of 64 the rms error alone says enough: two independent ones of one size differ by more than a factor of 2 in one of 10⁷
cases (the upper tail of F(64, 64) at 4).
"""
DRAWS = 16
"""Runs besides the case's own. An error that is estimated from 17 numbers is right within 17 % (1 / √(2·17))."""
ANOTHER_DECISION = 5.0
"""A run whose error is so many times the median run's took another decision, such as which mask is the best.

It says nothing of rounding, and is left out; of normal errors that happens to 1 in 1000 at most.
"""
MISTAKEN = 1e-3
"""How often compiled code that is as accurate as PyTorch may fail by chance, where the limit for many is too tight."""
FURTHER = 256.0
"""How much further inputs and weights are moved where usual errors are compared, relative to half a unit."""
USUAL_R_RMS = 1.5
"""Limit on the usual error of compiled code in units of PyTorch's, both in rms over as many runs and all numbers."""
USUAL_R_INF = 2.5
"""Limit on the number whose usual error is largest, in units of PyTorch's largest usual error of a number."""


def names_of_few(arrays: Mapping[str, Array]) -> list[str]:
    """Returns the names of the floating-point outputs that are judged by draws."""
    return [name for name, array in arrays.items() if array.dtype.kind == "f" and 0 < array.size < FEW]


def drawn_errors(
    programs: Mapping[str, Program],
    trace: Trace,
    names: Sequence[str],
    runs: Sequence[RunTrace],
    precision: Precision,
    seed: int,
    further: float = 1.0,
) -> list[Arrays]:
    """Runs a trace and the same in float64, `DRAWS` times.

    Each time every input and every weight is moved by half a unit of the precision's last place at most; what computes
    with them is the same. Weights are moved in place, and are their own again afterwards.

    Args:
        programs: By name.
        trace: The calls.
        names: Of the outputs that are kept. Calls that none of them needs are not run.
        runs: Each runs calls in the precision: in PyTorch, eager or under autocast, or as compiled code whose
            parameters share memory with the weights. What does not follow the weights is off by how far they are moved.
        precision: Of the case.
        seed: Of the moves.
        further: How much further everything is moved.

    Returns:
        For each of `runs`, by output its errors, float64 [DRAWS, elements].
    """
    import torch

    from harness.parity.oracle import oracle
    from harness.parity.trace import run_trace

    moved = _move(precision, seed, further)
    modules = list({id(program.module): program.module for program in programs.values()}.values())
    needed = _needed(programs, trace, names)
    drawn: list[dict[str, list[Array]]] = [{name: [] for name in names} for _ in runs]
    for _ in range(DRAWS):
        inputs = [
            replace(call, arguments=tuple(moved(a) if isinstance(a, torch.Tensor) else a for a in call.arguments))
            for call in trace
        ]
        calls = [call for call in inputs if call.name in needed]
        with _weights_moved(modules, moved):
            exact = run_trace(programs, calls, oracle)
            for run, errors in zip(runs, drawn, strict=True):
                rounded = run(calls)
                for name in names:
                    errors[name].append((rounded[name].astype(np.float64) - exact[name]).ravel())
    return [{name: np.stack(each) for name, each in errors.items()} for errors in drawn]


def _needed(programs: Mapping[str, Program], trace: Trace, names: Sequence[str]) -> set[str]:
    """Returns the names of the calls that make these outputs, and of those that they read outputs of."""
    needed: set[str] = set()
    for call in reversed(trace):
        if call.name in needed or any(f"{call.prefix}{output}" in names for output in programs[call.program].outputs):
            needed |= {call.name, *(value.call for value in call.arguments if isinstance(value, Output))}
    return needed


def _move(precision: Precision, seed: int, further: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that moves floating-point numbers by half a unit of the precision's last place at most."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    step = further * torch.finfo(getattr(torch, precision.dtype)).eps / 2

    def moved(values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return values
        by = 1 + step * (2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1)
        return (values.double() * by).to(values.dtype)

    return moved


@contextmanager
def _weights_moved(modules: Sequence[torch.nn.Module], moved: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    own = [(parameter.data, parameter.data.clone()) for module in modules for parameter in module.parameters()]
    try:
        for values, before in own:
            values.copy_(moved(before))
        yield
    finally:
        for values, before in own:
            values.copy_(before)


def judged_by_draws(
    verdicts: Sequence[Verdict],
    actual: Arrays,
    reference: Arrays,
    oracle: Arrays,
    draws: Arrays,
    *,
    strained: bool = False,
) -> tuple[Verdict, ...]:
    """Judges outputs again, by PyTorch's usual error: each by itself, and that of all samples together.

    Each error is divided by PyTorch's usual one in its own sample, that of the case's own run among the draws. r_rms
    and r_inf are those of an output by itself; its r_rms and that of the same output of all samples together have the
    limit of the oracle verdict. Only where code that is as accurate as PyTorch would exceed that by chance more often
    than `MISTAKEN` says, the limit is as much higher as that takes.

    Args:
        verdicts: From `harness.parity.verdict.judge`, of all outputs.
        actual: What the compiled model returned, by output name: the sample's, a slash, the output's.
        reference: PyTorch's.
        oracle: In float64.
        draws: Further errors as `drawn_errors` returns them, by output name.
        strained: Whether the strict gate counts. Elements may then leave it in those outputs only in which elements of
            a further run of PyTorch leave it, compared with the case's own run as compiled code is. How many errors are
            independent of each other follows from the draws.

    Returns:
        The same verdicts but for outputs of `draws` whose values decide: with the shape and dtype of the reference,
        finite, and not strict.
    """
    measured: dict[str, _Measured] = {}
    for verdict in verdicts:
        name = verdict.name
        if name in draws and _comparable(verdict, actual.get(name), reference[name], oracle[name]):
            usual = _usual(draws[name], reference[name], oracle[name], strained)
            if strained and verdict.outside and not usual.leaves_the_gate:
                continue
            measured[name] = _measure(actual[name].astype(np.float64) - oracle[name], usual)
    groups: dict[str, list[_Measured]] = {}
    for name, each in measured.items():
        groups.setdefault(_output(name), []).append(each)
    return tuple(
        _judged_again(verdict, measured[verdict.name], groups[_output(verdict.name)])
        if verdict.name in measured
        else verdict
        for verdict in verdicts
    )


def names_of_doubt(
    verdicts: Sequence[Verdict], actual: Arrays, reference: Arrays, oracle: Arrays, draws: Arrays
) -> list[str]:
    """Returns the names of outputs that failed and that the usual error of compiled code may still pass.

    Elements leave the gate only where those of a further run of PyTorch do, no number is off by more than the oracle
    verdict grants, and the one error alone does not make the usual one too large.

    Args:
        verdicts: From `judged_by_draws`, `strained`.
        actual: What the compiled model returned, by output name.
        reference: PyTorch's.
        oracle: In float64.
        draws: Further errors of PyTorch as `drawn_errors` returns them, by output name.
    """
    names = []
    for verdict in verdicts:
        name = verdict.name
        if verdict.kind is not VerdictKind.FAILED or name not in draws:
            continue
        if _comparable(verdict, actual.get(name), reference[name], oracle[name]):
            usual = _usual(draws[name], reference[name], oracle[name], strained=True)
            measured = _measure(actual[name].astype(np.float64) - oracle[name], usual)
            possible = measured.r_inf <= ORACLE_R_INF and _r_rms([measured]) <= USUAL_R_RMS * math.sqrt(1 + DRAWS)
            if possible and (usual.leaves_the_gate or not verdict.outside):
                names.append(name)
    return names


def judged_by_usual_errors(
    verdicts: Sequence[Verdict],
    actual: Arrays,
    reference: Arrays,
    oracle: Arrays,
    draws: Arrays,
    theirs: Arrays,
    ours: Arrays,
) -> tuple[Verdict, ...]:
    """Judges what failed by one run of compiled code, by the usual error of as many runs as PyTorch has.

    An error that luck made is not there in other runs; a fault is.

    Args:
        verdicts: From `judged_by_draws`, `strained`.
        actual: What the compiled model returned, by output name.
        reference: PyTorch's.
        oracle: In float64.
        draws: Further errors of PyTorch by output name, as for `judged_by_draws`.
        theirs: Its errors with everything moved `FURTHER`.
        ours: Those of the compiled model, with everything moved as for PyTorch.

    Returns:
        The same verdicts but for outputs of `names_of_doubt` that are in `ours`. Their r_rms is the usual error over
        PyTorch's, in rms over runs and numbers, and at most `USUAL_R_RMS`; their r_inf the largest usual error of a
        number over PyTorch's largest, at most `USUAL_R_INF`. The case's own run is one of the runs.
    """
    judged = {name for name in names_of_doubt(verdicts, actual, reference, oracle, draws) if name in ours}
    return tuple(
        _judged_by_both(
            verdict,
            np.concatenate([(actual[name].astype(np.float64) - oracle[name]).reshape(1, -1), ours[name]]),
            _usual(theirs[name], reference[name], oracle[name], strained=True),
        )
        if (name := verdict.name) in judged
        else verdict
        for verdict in verdicts
    )


def _judged_by_both(verdict: Verdict, errors: Array, usual: _Usual) -> Verdict:
    r_rms = float(_divided(np.sqrt(np.mean(errors**2)), usual.rms))
    r_inf = float(_divided(np.sqrt(np.mean(errors**2, axis=0)).max(), usual.largest_number))
    passed = r_rms <= USUAL_R_RMS and r_inf <= USUAL_R_INF
    reason = (
        f"{verdict.reason}; over {len(errors)} runs the usual error of compiled code is {r_rms:.3g} of PyTorch's, and "
        f"{r_inf:.3g} in the worst number: {USUAL_R_RMS:g} and {USUAL_R_INF:g} are granted"
    )
    kind = VerdictKind.ORACLE if passed else VerdictKind.FAILED
    return replace(verdict, kind=kind, reason=reason, r_rms=r_rms, r_inf=r_inf)


def _output(name: str) -> str:
    return name.rpartition("/")[2]


def _comparable(verdict: Verdict, actual: Array | None, reference: Array, oracle: Array) -> bool:
    if actual is None or verdict.kind not in (VerdictKind.STRICT, VerdictKind.ORACLE, VerdictKind.FAILED):
        return False
    same = actual.shape == reference.shape and actual.dtype == reference.dtype
    return same and all(np.isfinite(array).all() for array in (actual, reference, oracle))


@dataclass(frozen=True)
class _Usual:
    """PyTorch's usual error of an output.

    Attributes:
        rms: Its root mean square.
        largest: The largest.
        largest_number: The largest root mean square of a number's errors.
        runs: In how many runs it was seen.
        independent: How many errors of a run are independent of each other.
        leaves_the_gate: Whether the gate, between PyTorch's own run and another one of it, leaves an element outside.
    """

    rms: float
    largest: float
    largest_number: float
    runs: int
    independent: float
    leaves_the_gate: bool


@dataclass(frozen=True)
class _Measured:
    """The error of an output in units of PyTorch's usual one.

    Attributes:
        squares: The sum of its squares.
        r_inf: The largest.
        numbers: How many numbers it is.
        usual: The usual one.
    """

    squares: float
    r_inf: float
    numbers: int
    usual: _Usual


def _judged_again(verdict: Verdict, own: _Measured, group: Sequence[_Measured]) -> Verdict:
    verdict = replace(verdict, r_rms=_r_rms([own]), r_inf=own.r_inf)
    if verdict.kind is VerdictKind.STRICT:
        return verdict
    reason = verdict.reason.partition("; the oracle verdict needs")[0]
    for several, where in (([own], ""), (group, f" over the {sum(each.numbers for each in group)} of all samples")):
        limit = max(ORACLE_R_RMS, _least_limit(several))
        if not _r_rms(several) <= limit:
            reason += f"; by PyTorch's usual error r_rms ≤ {limit:.3g} is needed, got {_r_rms(several):.3g}{where}"
            return replace(verdict, kind=VerdictKind.FAILED, reason=reason)
    if not own.r_inf <= ORACLE_R_INF:
        reason += f"; by PyTorch's usual error r_inf ≤ {ORACLE_R_INF:g} is needed, got {own.r_inf:.3g}"
        return replace(verdict, kind=VerdictKind.FAILED, reason=reason)
    return replace(verdict, kind=VerdictKind.ORACLE, reason=reason)


def _measure(errors: Array, usual: _Usual) -> _Measured:
    shares = _divided(errors, usual.rms)
    largest = float(_divided(np.abs(errors).max(), usual.largest))
    return _Measured(float(np.sum(shares**2)), largest, errors.size, usual)


def _r_rms(outputs: Sequence[_Measured]) -> float:
    return math.sqrt(sum(each.squares for each in outputs) / sum(each.numbers for each in outputs))


def _least_limit(outputs: Sequence[_Measured]) -> float:
    """Returns what the ratio of two rms values exceeds with the probability `MISTAKEN`: a quantile of Fisher's F."""
    from scipy.stats import f

    own = sum(each.usual.independent for each in outputs)
    return math.sqrt(f.isf(MISTAKEN, own, sum(each.usual.independent * each.usual.runs for each in outputs)))


def _usual(draws: Array, reference: Array, oracle: Array, strained: bool) -> _Usual:
    own = (reference.astype(np.float64) - oracle).reshape(1, -1)
    errors = np.concatenate([own, draws])
    each = np.sqrt(np.mean(errors**2, axis=1))
    errors = errors[each <= ANOTHER_DECISION * np.median(each)]
    floor = metrics.FLOOR_EPS * float(np.finfo(np.float32).eps)  # as in `metrics.oracle_ratio`
    rms, largest = float(np.sqrt(np.mean(errors**2))), float(np.abs(errors).max())
    of_largest = floor * float(np.abs(oracle).max())
    return _Usual(
        rms=max(rms, floor * float(np.sqrt(np.mean(oracle**2)))),
        largest=max(largest, of_largest),
        largest_number=max(float(np.sqrt(np.mean(errors**2, axis=0)).max()), of_largest),
        runs=len(errors),
        independent=_independent(errors) if strained else own.size,
        leaves_the_gate=bool((np.abs(draws - own) > metrics.ATOL + metrics.RTOL * np.abs(reference).ravel()).any()),
    )


def _independent(errors: Array) -> float:
    """Returns how many errors of a run are at least independent of each other, of errors [runs, numbers].

    The mean of n squares of independent normal errors of one size has a variance of 2/n of its own square. Some 17 runs
    tell n within a factor of 2, and its half keeps what fails by chance near `MISTAKEN` (2 in 1000 for n = 1).
    """
    squares = np.mean(errors**2, axis=1)
    mean, count = float(np.mean(squares)), float(errors.shape[1])
    variance = float(np.var(squares, ddof=1))
    return float(np.clip(mean**2 / variance, 1, count)) if variance else count


def _divided(errors: Any, scale: float) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0.0, errors / scale)
