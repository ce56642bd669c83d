"""Estimates how large PyTorch's errors typically are, where the error of a single run is luck.

The oracle verdict divides the error of compiled code by that of PyTorch. Over thousands of independent errors that is a
measurement, but the error of one number is luck: of two normal errors of one size, one is more than twice the other in
three of ten cases (1 - 2/π·atan 2). PyTorch is therefore run several times, each time with inputs and weights that the
precision can hardly distinguish from the case's, and measured against float64 with the same values. Every run rounds
anew, and draws a new error (Parker, Monte Carlo Arithmetic, 1997, perturbs operands so).

In half precision, outputs of few numbers need this. In fp32, outputs that otherwise fail need it with the weights
`outliers`: if all numbers of an output follow from one token, a massive channel of this token makes their errors one.
If one run of compiled code fails even then, the compiled code is run as often as PyTorch, and its typical error is
divided by PyTorch's: a fault is in every run, bad luck is not. Inputs and weights are perturbed more for that. A logit
of 300, whose unit in the last place is 3e-5, is not rounded anew by half a unit in its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.outcome import Verdict, VerdictKind
from harness.core.precision import Precision
from harness.core.program import Array, Arrays, Output, Program, Trace
from harness.parity import metrics
from harness.parity.references import Reference, run_trace
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS

if TYPE_CHECKING:
    import torch

RunTrace = Callable[[Trace], Mapping[str, Array]]
"""Runs the calls of a trace; returns arrays by output name."""

SMALL_SIZE = 64
"""An output of fewer numbers is judged by draws.

For 64 numbers one rms error suffices: two independent ones of one size differ by more than a factor of 2 in one of 10⁷
cases (the upper tail of F(64, 64) at 4).
"""
DRAWS = 16
"""Number of runs besides the case's own. An error estimated from 17 numbers is right within 17 % (1 / √(2·17))."""
OUTLIER_RATIO = 5.0
"""Ratio of a run's error to the median run's from which the run took another decision, such as another best mask.

Such a run says nothing about rounding, and is left out; of normal errors at most 1 in 1000 is left out.
"""
FALSE_ALARM_RATE = 1e-3
"""Probability that compiled code as accurate as PyTorch fails by chance, which widens limits that are too tight."""
PERTURBATION_SCALE = 256.0
"""Scale of the perturbation where typical errors are compared, relative to half a unit in the last place."""
TYPICAL_R_RMS = 1.5
"""Limit on the typical error of compiled code relative to PyTorch's, in rms over as many runs and all numbers."""
TYPICAL_R_INF = 2.5
"""Limit on the largest typical error of one number, relative to PyTorch's largest."""


def small_outputs(arrays: Mapping[str, Array]) -> list[str]:
    """Returns the names of the floating-point outputs that are judged by draws."""
    return [name for name, array in arrays.items() if array.dtype.kind == "f" and 0 < array.size < SMALL_SIZE]


def draw_errors(
    programs: Mapping[str, Program],
    trace: Trace,
    names: Sequence[str],
    runs: Sequence[RunTrace],
    precision: Precision,
    seed: int,
    scale: float = 1.0,
) -> list[Arrays]:
    """Runs a trace, and the same trace in float64, `DRAWS` times.

    Each time, every input and every weight is perturbed by at most half a unit in the precision's last place; the same
    values are used in float64. Weights are perturbed in place and restored afterwards.

    Args:
        programs: Programs by name.
        trace: The calls.
        names: Names of the outputs to return. Calls that no such output needs are not run.
        runs: Functions that run calls in the precision: in PyTorch, eager or under autocast, or as compiled code whose
            parameters share memory with the weights. Values that do not follow the weights are wrong by the
            perturbation.
        precision: Precision of the case.
        seed: Seed of the perturbations.
        scale: Scale of the perturbation, relative to half a unit.

    Returns:
        For each of `runs`, the errors by output, float64 [DRAWS, elements].
    """
    import torch

    from harness.parity.oracle import oracle

    perturb = _perturbation(precision, seed, scale)
    modules = list({id(program.module): program.module for program in programs.values()}.values())
    needed = _needed_calls(programs, trace, names)
    error_lists: list[dict[str, list[Array]]] = [{name: [] for name in names} for _ in runs]
    for _ in range(DRAWS):
        inputs = [
            replace(call, arguments=tuple(perturb(a) if isinstance(a, torch.Tensor) else a for a in call.arguments))
            for call in trace
        ]
        calls = [call for call in inputs if call.name in needed]
        with _perturbed_weights(modules, perturb):
            exact = run_trace(programs, calls, oracle)
            for run, errors in zip(runs, error_lists, strict=True):
                rounded = run(calls)
                for name in names:
                    errors[name].append((rounded[name].astype(np.float64) - exact[name]).ravel())
    return [{name: np.stack(samples) for name, samples in errors.items()} for errors in error_lists]


def _needed_calls(programs: Mapping[str, Program], trace: Trace, names: Sequence[str]) -> set[str]:
    """Returns the names of the calls that compute these outputs, directly or through other calls."""
    needed: set[str] = set()
    for call in reversed(trace):
        if call.name in needed or any(f"{call.prefix}{output}" in names for output in programs[call.program].outputs):
            needed |= {call.name, *(value.call for value in call.arguments if isinstance(value, Output))}
    return needed


def _perturbation(precision: Precision, seed: int, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that perturbs floating-point numbers by at most half a unit in the precision's last place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    step = scale * torch.finfo(getattr(torch, precision.dtype)).eps / 2

    def perturb(values: torch.Tensor) -> torch.Tensor:
        if not values.is_floating_point():
            return values
        factor = 1 + step * (2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1)
        return (values.double() * factor).to(values.dtype)

    return perturb


@contextmanager
def _perturbed_weights(
    modules: Sequence[torch.nn.Module], perturb: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    weights = [(parameter.data, parameter.data.clone()) for module in modules for parameter in module.parameters()]
    try:
        for values, originals in weights:
            values.copy_(perturb(originals))
        yield
    finally:
        for values, originals in weights:
            values.copy_(originals)


def judge_by_draws(
    verdicts: Sequence[Verdict],
    actual: Arrays,
    reference: Reference,
    draws: Arrays,
    *,
    ill_conditioned: bool = False,
) -> tuple[Verdict, ...]:
    """Judges outputs again by PyTorch's typical error, each output alone and all samples of it together.

    Each error is divided by PyTorch's typical error in the same sample, where the case's own run is one of the draws.
    r_rms and r_inf are those of an output alone. Its r_rms, and the r_rms over all samples of the output, have the
    limit of the oracle verdict. The limit is raised only if code as accurate as PyTorch would exceed it by chance more
    often than `FALSE_ALARM_RATE`.

    Args:
        verdicts: Verdicts of `harness.parity.verdict.judge` on all outputs.
        actual: The compiled model's outputs by name: the sample's name, a slash, the output's.
        reference: PyTorch's outputs.
        draws: Further errors, as `draw_errors` returns them, by output name.
        ill_conditioned: Whether the strict gate counts. Elements may then leave it only in outputs where elements of a
            further run of PyTorch leave it, relative to the case's own run. The draws tell how many errors are
            independent.

    Returns:
        The same verdicts, except for outputs of `draws` whose values decide: finite values with the shape and dtype of
        the reference that are not strict.
    """
    relative_errors = {
        verdict.name: error
        for verdict in verdicts
        if (error := _relative_error(verdict, actual, reference, draws, ill_conditioned)) is not None
    }
    groups: dict[str, list[_RelativeError]] = {}
    for name, error in relative_errors.items():
        groups.setdefault(_output(name), []).append(error)
    return tuple(
        _judge_again(verdict, relative_errors[verdict.name], groups[_output(verdict.name)])
        if verdict.name in relative_errors
        else verdict
        for verdict in verdicts
    )


def ambiguous_outputs(verdicts: Sequence[Verdict], actual: Arrays, reference: Reference, draws: Arrays) -> list[str]:
    """Returns the names of failed outputs that the typical error of compiled code may still pass.

    Elements leave the gate only where those of a further run of PyTorch do, no number exceeds the limit of the oracle
    verdict, and the error of this run alone does not make the typical error too large.

    Args:
        verdicts: Verdicts of `judge_by_draws` with `ill_conditioned`.
        actual: The compiled model's outputs by name.
        reference: PyTorch's outputs.
        draws: Further errors of PyTorch, as `draw_errors` returns them, by output name.
    """
    failed = [verdict for verdict in verdicts if verdict.kind is VerdictKind.FAILED]
    errors = {verdict.name: _relative_error(verdict, actual, reference, draws, True) for verdict in failed}
    limit = TYPICAL_R_RMS * math.sqrt(1 + DRAWS)
    return [
        name for name, error in errors.items() if error and error.r_inf <= ORACLE_R_INF and _r_rms([error]) <= limit
    ]


def judge_by_typical_errors(
    verdicts: Sequence[Verdict],
    actual: Arrays,
    reference: Reference,
    draws: Arrays,
    torch_errors: Arrays,
    tvm_errors: Arrays,
) -> tuple[Verdict, ...]:
    """Judges failed outputs again by the typical error over as many runs as PyTorch has.

    An error by bad luck is absent in other runs; a fault is present in all.

    Args:
        verdicts: Verdicts of `judge_by_draws` with `ill_conditioned`.
        actual: The compiled model's outputs by name.
        reference: PyTorch's outputs.
        draws: Further errors of PyTorch by output name, as for `judge_by_draws`.
        torch_errors: PyTorch's errors with the perturbation scaled by `PERTURBATION_SCALE`.
        tvm_errors: The compiled model's errors with the same perturbation.

    Returns:
        The same verdicts, except for outputs of `ambiguous_outputs` that are in `tvm_errors`. Their r_rms is the
        typical error divided by PyTorch's, in rms over runs and numbers, and at most `TYPICAL_R_RMS`. Their r_inf is
        the largest typical error of a number divided by PyTorch's largest, and at most `TYPICAL_R_INF`. The case's own
        run is one of the runs.
    """
    ambiguous = set(ambiguous_outputs(verdicts, actual, reference, draws)) & tvm_errors.keys()

    def judge_again(verdict: Verdict) -> Verdict:
        name = verdict.name
        if name not in ambiguous:
            return verdict
        first, exact = reference.first[name], reference.exact[name]
        errors = np.concatenate([(actual[name].astype(np.float64) - exact).reshape(1, -1), tvm_errors[name]])
        typical = _typical_error(torch_errors[name], first, exact, ill_conditioned=True)
        r_rms = float(_divide(np.sqrt(np.mean(errors**2)), typical.rms))
        r_inf = float(_divide(np.sqrt(np.mean(errors**2, axis=0)).max(), typical.largest_number))
        passed = r_rms <= TYPICAL_R_RMS and r_inf <= TYPICAL_R_INF
        reason = (
            f"{verdict.reason}; over {len(errors)} runs the usual error of compiled code is {r_rms:.3g} of PyTorch's, "
            f"and {r_inf:.3g} in the worst number: {TYPICAL_R_RMS:g} and {TYPICAL_R_INF:g} are granted"
        )
        kind = VerdictKind.ORACLE if passed else VerdictKind.FAILED
        return replace(verdict, kind=kind, reason=reason, r_rms=r_rms, r_inf=r_inf)

    return tuple(map(judge_again, verdicts))


def _output(name: str) -> str:
    return name.rpartition("/")[2]


@dataclass(frozen=True)
class _TypicalError:
    """PyTorch's typical error of an output.

    Attributes:
        rms: Root mean square of the errors.
        largest: Largest error.
        largest_number: Largest root mean square of one number's errors.
        runs: Number of runs.
        independent: Number of errors of a run that are independent of each other.
        leaves_gate: Whether a further run of PyTorch has an element outside the gate around PyTorch's own run.
    """

    rms: float
    largest: float
    largest_number: float
    runs: int
    independent: float
    leaves_gate: bool


@dataclass(frozen=True)
class _RelativeError:
    """The error of an output relative to PyTorch's typical error.

    Attributes:
        squares: Sum of the squared errors.
        r_inf: Largest error.
        numbers: Number of elements.
        typical: PyTorch's typical error.
    """

    squares: float
    r_inf: float
    numbers: int
    typical: _TypicalError


def _judge_again(verdict: Verdict, error: _RelativeError, group: Sequence[_RelativeError]) -> Verdict:
    verdict = replace(verdict, r_rms=_r_rms([error]), r_inf=error.r_inf)
    if verdict.kind is VerdictKind.STRICT:
        return verdict
    reason = verdict.reason.partition("; the oracle verdict needs")[0]
    for errors, scope in (
        ([error], ""),
        (group, f" over the {sum(item.numbers for item in group)} of all samples"),
    ):
        limit = max(ORACLE_R_RMS, _chance_limit(errors))
        if not _r_rms(errors) <= limit:
            reason += f"; by PyTorch's usual error r_rms ≤ {limit:.3g} is needed, got {_r_rms(errors):.3g}{scope}"
            return replace(verdict, kind=VerdictKind.FAILED, reason=reason)
    if not error.r_inf <= ORACLE_R_INF:
        reason += f"; by PyTorch's usual error r_inf ≤ {ORACLE_R_INF:g} is needed, got {error.r_inf:.3g}"
        return replace(verdict, kind=VerdictKind.FAILED, reason=reason)
    return replace(verdict, kind=VerdictKind.ORACLE, reason=reason)


def _relative_error(
    verdict: Verdict, actual: Arrays, reference: Reference, draws: Arrays, ill_conditioned: bool
) -> _RelativeError | None:
    """Measures an output relative to PyTorch's typical error; None if draws cannot decide its verdict."""
    name = verdict.name
    if name not in draws or name not in actual or verdict.kind is VerdictKind.NOT_JUDGEABLE:
        return None
    a, r, o = actual[name], reference.first[name], reference.exact[name]
    if (a.shape, a.dtype) != (r.shape, r.dtype) or not all(np.isfinite(array).all() for array in (a, r, o)):
        return None
    typical = _typical_error(draws[name], r, o, ill_conditioned)
    if ill_conditioned and verdict.outside and not typical.leaves_gate:
        return None
    errors = a.astype(np.float64) - o
    squares = float(np.sum(_divide(errors, typical.rms) ** 2))
    return _RelativeError(squares, float(_divide(np.abs(errors).max(), typical.largest)), errors.size, typical)


def _r_rms(outputs: Sequence[_RelativeError]) -> float:
    return math.sqrt(sum(output.squares for output in outputs) / sum(output.numbers for output in outputs))


def _chance_limit(errors: Sequence[_RelativeError]) -> float:
    """Returns the ratio of two rms values exceeded with probability `FALSE_ALARM_RATE`: a quantile of Fisher's F."""
    from scipy.special import fdtri  # what scipy.stats computes, without its import

    count = sum(error.typical.independent for error in errors)
    typical_count = sum(error.typical.independent * error.typical.runs for error in errors)
    return math.sqrt(fdtri(count, typical_count, 1 - FALSE_ALARM_RATE))


def _typical_error(draws: Array, reference: Array, oracle: Array, ill_conditioned: bool) -> _TypicalError:
    case_errors = (reference.astype(np.float64) - oracle).reshape(1, -1)
    errors = np.concatenate([case_errors, draws])
    run_rms = np.sqrt(np.mean(errors**2, axis=1))
    errors = errors[run_rms <= OUTLIER_RATIO * np.median(run_rms)]
    floor = metrics.FLOOR_EPS * float(np.finfo(np.float32).eps)  # as in `metrics.oracle_ratio`
    rms, largest = float(np.sqrt(np.mean(errors**2))), float(np.abs(errors).max())
    largest_floor = floor * float(np.abs(oracle).max())
    return _TypicalError(
        rms=max(rms, floor * float(np.sqrt(np.mean(oracle**2)))),
        largest=max(largest, largest_floor),
        largest_number=max(float(np.sqrt(np.mean(errors**2, axis=0)).max()), largest_floor),
        runs=len(errors),
        independent=_independent_errors(errors) if ill_conditioned else case_errors.size,
        leaves_gate=bool((np.abs(draws - case_errors) > metrics.ATOL + metrics.RTOL * np.abs(reference).ravel()).any()),
    )


def _independent_errors(errors: Array) -> float:
    """Returns a lower bound on the number of independent errors of a run, from errors [runs, numbers].

    The mean of n squares of independent normal errors of one size has a variance of 2/n times its own square. Some 17
    runs tell n within a factor of 2. Half of n keeps the probability of failing by chance near `FALSE_ALARM_RATE` (2 in
    1000 for n = 1).
    """
    squares = np.mean(errors**2, axis=1)
    mean, count = float(np.mean(squares)), float(errors.shape[1])
    variance = float(np.var(squares, ddof=1))
    return float(np.clip(mean**2 / variance, 1, count)) if variance else count


def _divide(errors: Any, scale: float) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0.0, errors / scale)
