"""Defines the diagnosis of a case: errors over its program, the first kernel that diverges, and its cause.

All of it is plain data, which `harness.verify.diagnose.runner` computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from harness.core.case import Case
from harness.verify.diagnose.deviation import Deviation

_CERTAIN = 10.0
"""Excess from which an error cannot be rounding: ten times the limits of the oracle verdict."""


class Confidence(StrEnum):
    """The certainty that a kernel is the first that is wrong."""

    CERTAIN = "certain"
    """Its local error is far above rounding."""
    LIKELY = "likely"
    """Its local error is above the limits, but at most ten times."""


@dataclass(frozen=True)
class Boundary:
    """One call of a compiled function, compared with the node whose value it returns.

    Attributes:
        position: Position of the call, counted from 0, including the calls at load.
        function: Name of the function.
        at_load: Whether the call is made when the model is loaded.
        node: Name of the node of the exported program.
        source: Line of the model's source that the node comes from.
        operators: ATen operators that the call computes, in order, without repetition.
        inside: Names of the nodes that the call computes.
        between: Functions whose results belong to no node, and which are compared together with the call.
        shape: Shape of the result.
        local: Error of the call with PyTorch's values as inputs.
        accumulated: Error of the call in the run.
    """

    position: int
    function: str
    at_load: bool
    node: str
    source: str
    operators: tuple[str, ...]
    inside: tuple[str, ...]
    between: tuple[str, ...]
    shape: tuple[int, ...]
    local: Deviation
    accumulated: Deviation

    @property
    def own_share(self) -> float:
        """The call's own share of the squared error at this boundary; NaN without an error."""
        if not self.accumulated.error > 0:
            return math.nan
        return min(1.0, (self.local.error / self.accumulated.error) ** 2)


@dataclass(frozen=True)
class Coverage:
    """The compared part of the exported program, for the calls on which the outputs depend.

    Attributes:
        compared: Number of nodes whose values were compared.
        covered: Number of nodes inside a compared call, or that only move compared values.
        skipped: Other nodes, with the reason.
        unnamed: Number of calls whose results belong to no node, by function: packed weights, layouts of a kernel,
            parts of a node.
    """

    compared: int
    covered: int
    skipped: dict[str, str]
    unnamed: dict[str, int]


@dataclass(frozen=True)
class Divergence:
    """The first kernel whose error exceeds rounding.

    Attributes:
        boundary: The kernel's call.
        confidence: Certainty of the finding.
        reason: The reason in a sentence.
        others: Positions of later calls that diverge by themselves.
    """

    boundary: Boundary
    confidence: Confidence
    reason: str
    others: tuple[int, ...]


class Cause(StrEnum):
    """The part of the compilation that makes a kernel or the program wrong."""

    STRATEGY = "strategy"
    EXPORT = "export or patch"
    IMPORTER = "importer"
    LEGALIZATION = "legalization"
    SCHEDULE = "schedule"
    FUSION = "fusion or folding"
    CODE_GENERATION = "code generation"
    RUNTIME = "packing or runtime"


WAYS = {
    Cause.IMPORTER: "TVM's own legalizations and loops",
    Cause.LEGALIZATION: "this project's legalizations, loops as they come",
    Cause.SCHEDULE: "this project's kernels and schedules, each operator by itself",
    Cause.FUSION: "all that the program does, in a module of its own",
}
"""The way in which an experiment computes the operators of a kernel, by the cause that it decides for, plainest first.
"""


class ImportWay(StrEnum):
    """A further way to import the nodes of a kernel, if their import is wrong."""

    RAW = "imported without this project's workarounds"
    ONNX = "imported by the frontend onnx"


@dataclass(frozen=True)
class Experiment:
    """The operators of a kernel, computed in another way.

    Attributes:
        decides: The cause if this experiment is wrong and those before it are right; see `WAYS`.
        result: Error of the operators with PyTorch's values as inputs; None if they could not be computed.
        problem: Why they could not be computed, in one line.
        with_before: Whether the operators of the calls that compute the kernel's inputs are included.
        otherwise: Whether the operators are wrong in another way than in the program, which decides nothing.
    """

    decides: Cause
    result: Deviation | None
    problem: str = ""
    with_before: bool = False
    otherwise: bool = False

    @property
    def way(self) -> str:
        """The way in which the operators are computed, in words."""
        return WAYS[self.decides] + (", together with those before it" if self.with_before else "")


class Rerun(StrEnum):
    """A further way to run the code of the deciding experiment."""

    ONE_THREAD = "on one thread"
    UNOPTIMIZED = "without LLVM's optimizations"


@dataclass(frozen=True)
class Retrial:
    """A wrong experiment, repeated with another run or another import.

    Attributes:
        way: The difference to the experiment.
        result: Error with PyTorch's values as inputs; None if there is no result.
        problem: Why there is no result, in one line.
    """

    way: Rerun | ImportWay
    result: Deviation | None
    problem: str = ""

    @property
    def end(self) -> str:
        """The end of the repetition, in words."""
        return "not possible" if self.result is None else "wrong" if self.result.is_fault else "right"


@dataclass(frozen=True)
class Ablation:
    """The experiments on one kernel, and their conclusion.

    Attributes:
        experiments: Experiments in order, up to the wrong one.
        cause: The cause. It is `CODE_GENERATION` if the wrong experiment is right without LLVM's optimizations. If no
            experiment is wrong, it is `RUNTIME`, or `SCHEDULE` for an unsteady kernel. It is None if the last
            experiment could not be computed.
        reruns: Repetitions of the wrong experiment, until it is right.
        imports: Other imports of the same nodes, if the cause is `IMPORTER`.
        passes: If the cause is `FUSION`, the pass of the pipeline before which the kernel is right and after which it
            is wrong; several if nothing between them can be compiled, none if it was not found.
    """

    experiments: tuple[Experiment, ...]
    cause: Cause | None
    reruns: tuple[Retrial, ...] = ()
    imports: tuple[Retrial, ...] = ()
    passes: tuple[str, ...] = ()

    @property
    def wrong(self) -> Cause | None:
        """The cause that the wrong experiment decides for; None if none is wrong."""
        last = self.experiments[-1]
        return last.decides if last.result is not None and last.result.is_fault else None

    @property
    def fixed_by(self) -> Rerun | ImportWay | None:
        """The repetition in which the wrong experiment is right; None if there is none."""
        return next((retrial.way for retrial in self.reruns if retrial.result and not retrial.result.is_fault), None)

    @property
    def reason(self) -> str:
        """The deciding experiment, in words."""
        experiments = self.experiments
        problems = [
            f"{experiment.way}: {experiment.problem}" for experiment in experiments if experiment.result is None
        ]
        not_computed = f" (not computed with {'; '.join(problems)})" if problems else ""
        if self.cause is None:
            return f"no experiment that could be made is wrong{not_computed}"
        if self.wrong is None:
            bits = ", and the kernel does not always make the same bits: its tasks disturb each other"
            unsteady = "" if self.cause is Cause.RUNTIME else bits
            return f"its operators are right in a module of their own{not_computed}{unsteady}"
        right = [experiment.way for experiment in experiments if experiment.result and not experiment.result.is_fault]
        otherwise = [experiment.way for experiment in experiments if experiment.otherwise]
        parts = [
            f"its operators are wrong with {experiments[-1].way}",
            f" and right {self.fixed_by}" if self.fixed_by else "",
            ": tasks of a parallel loop change what others read or write" if self.fixed_by is Rerun.ONE_THREAD else "",
            f", right with {right[-1]}" if right else "",
            *(f", wrong in another way with {way}" for way in otherwise),
            not_computed,
            f", right before the pass {' or '.join(self.passes)} and wrong after it" if self.passes else "",
        ]
        if self.imports:
            parts.append("; " + ", ".join(f"{retrial.way} {retrial.end}" for retrial in self.imports))
            parts.append(f": the fault is in {self.responsible}" if self.responsible else "")
        return "".join(parts)

    @property
    def needs_context(self) -> bool:
        """Returns whether the kernel is right by itself, and wrong only together with the operators before it."""
        return self.wrong is None or self.experiments[-1].with_before

    @property
    def responsible(self) -> str:
        """The part that is responsible for a wrong import, in words; empty if it is unknown."""
        wrong_by_way = {retrial.way: retrial.result.is_fault for retrial in self.imports if retrial.result is not None}
        raw, onnx = wrong_by_way.get(ImportWay.RAW), wrong_by_way.get(ImportWay.ONNX)
        if raw is None:
            return "this project's workarounds: TVM alone does not import it so" if onnx is False else ""
        if not raw:
            return "this project's workarounds"
        if onnx is None:
            return "TVM"
        return "TVM's legalization of the operators, or PyTorch's decomposition" if onnx else "TVM's importer"


@dataclass(frozen=True)
class Reproduction:
    """Files that show the fault of a kernel without this project.

    Attributes:
        files: Contents of the folder by name; empty if there is no reproduction.
        description: Description of the contents, or why there is no reproduction; a clause.
    """

    files: Mapping[str, bytes]
    description: str


@dataclass(frozen=True)
class Misshapen:
    """An output with a wrong shape; its values may be right.

    Attributes:
        output: Name of the output.
        shape: Shape of the output.
        expected: Shape of PyTorch's output.
        node: First node whose imported value has another shape than PyTorch's; empty if there is none.
        source: Line of the model's source that the node comes from.
    """

    output: str
    shape: tuple[int, ...]
    expected: tuple[int, ...]
    node: str
    source: str


@dataclass(frozen=True)
class Rewriting:
    """A difference between the compiled program and the model that PyTorch already shows.

    Attributes:
        cause: `STRATEGY`, or `EXPORT` if the program is as wrong without the strategy: by torch.export, by PyTorch's
            decomposition, or by a patch that is active while a model is traced.
        source: Line of the model whose value is lost, or that is exported as something else; empty if it is unknown.
        by: Line of the code that replaces it; empty if it is unknown.
        result: Largest error of an output if PyTorch computes the program.
    """

    cause: Cause
    source: str
    by: str
    result: Deviation


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one program of a case.

    Attributes:
        case: The case.
        program: Name of the program.
        boundaries: Every compared call, in order.
        outputs: Errors of the outputs against the model itself, by name.
        coverage: The compared part of the exported program.
        first: The first kernel that diverges; None if none does.
        changed: Functions whose inputs differ from the written values, because their memory was reused too early.
        altered: Nodes of weights and inputs whose values in the run are not PyTorch's.
        misshapen: Outputs with a wrong shape.
        unsteady: Functions whose results for the same values do not always have the same bits.
        luck: Nodes of few numbers that exceed the limits in half precision. The limits are relative to one run of
            autocast, which says nothing about so few numbers (`harness.parity.monte_carlo`), so they are not wrong.
        luck_of_outputs: Outputs of few numbers, likewise.
        ablation: The cause of the first divergence.
        reproduction: The reproduction of the first divergence, if it was requested; no part of the JSON.
        failed: Outputs that a verification rejects, with the reasons.
        rewriting: The difference between compiled program and model; None if there is none, or no output is wrong.
    """

    case: Case
    program: str
    boundaries: tuple[Boundary, ...]
    outputs: dict[str, Deviation]
    coverage: Coverage
    first: Divergence | None
    changed: tuple[str, ...]
    altered: tuple[str, ...] = ()
    misshapen: tuple[Misshapen, ...] = ()
    unsteady: tuple[str, ...] = ()
    luck: tuple[str, ...] = ()
    luck_of_outputs: tuple[str, ...] = ()
    ablation: Ablation | None = None
    reproduction: Reproduction | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    rewriting: Rewriting | None = None

    @property
    def faulty(self) -> bool:
        """Returns whether anything besides rounding is wrong."""
        return self.first is not None or any(
            (self.changed, self.altered, self.misshapen, self.unsteady, self.wrong_outputs)
        )

    @property
    def wrong_outputs(self) -> list[str]:
        """Names of the wrong outputs: their errors exceed the limits, or a verification rejects them."""
        names = (name for name, error in self.outputs.items() if error.is_fault or name in self.failed)
        return [name for name in names if name not in self.luck_of_outputs]


def first_divergence(boundaries: Sequence[Boundary]) -> Divergence | None:
    """Returns the first call whose local error exceeds rounding; None if there is none."""
    wrong = [boundary for boundary in boundaries if boundary.local.is_fault]
    if not wrong:
        return None
    first, *later = wrong
    confidence = Confidence.CERTAIN if first.local.excess >= _CERTAIN else Confidence.LIKELY
    reason = (
        f"{first.local.wrong} elements that had to be equal differ"
        if first.local.wrong
        else f"given PyTorch's own inputs, its error is {first.local.r_rms:.3g} times PyTorch's"
    )
    suffix = f"; it is compared together with {', '.join(first.between)}" if first.between else ""
    return Divergence(first, confidence, reason + suffix, tuple(boundary.position for boundary in later))


def budget(diagnosis: Diagnosis) -> dict[str, float]:
    """Returns the share of each kind of call in the squared errors of all calls, largest first.

    The kind of a call is the operators that it computes. Relative errors are added, so that later amplification of an
    error does not count.
    """
    squares: dict[str, float] = {}
    for boundary in diagnosis.boundaries:
        if math.isfinite(boundary.local.error):
            names = [name.partition(".")[0] for name in boundary.operators if name not in _MOVES]
            kind = " ".join(names[:4]) + (" …" if len(names) > 4 else "") if names else "moves"
            squares[kind] = squares.get(kind, 0.0) + boundary.local.error**2
    total = sum(squares.values())
    return {kind: share / total for kind, share in sorted(squares.items(), key=lambda item: -item[1]) if share}


_MOVES = frozenset(
    ("view", "permute", "expand", "clone", "unsqueeze", "squeeze", "getitem", "slice.Tensor", "select.int", "t")
)
"""Operators that only move elements; calls are named after their other operators."""
