"""The diagnosis of a case: two curves over its program, the first kernel that diverges, and where errors are made.

Plain data; `harness.diagnose.diagnosing` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from harness.core.case import Case
from harness.diagnose.deviation import Deviation

_CERTAIN = 10.0
"""Excess from which on an error cannot be rounding: ten times the limits of the oracle verdict."""


class Confidence(StrEnum):
    """How sure it is that a kernel is the first that is wrong."""

    CERTAIN = "certain"
    """Its local error is far above rounding."""
    LIKELY = "likely"
    """Its local error is above the limits, but within ten times of them."""


@dataclass(frozen=True)
class Boundary:
    """One call of a compiled function, compared with the node whose value it returns.

    Attributes:
        position: Number of the call, counted from 0 and from the load on.
        function: Its name.
        at_load: Whether it is called when the model is loaded.
        node: Name of the node of the exported program.
        source: Line of the model's source that the node comes from.
        operators: ATen operators that the call computes, in order, each once.
        inside: Names of the nodes that it computes.
        between: Functions whose results are of no node, and which are compared together with it.
        shape: Shape of the result.
        local: Error of the call when it is given PyTorch's values.
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
        """The part of the squared error at this boundary that the call makes itself; NaN where there is no error."""
        if not self.accumulated.error > 0:
            return math.nan
        return min(1.0, (self.local.error / self.accumulated.error) ** 2)


@dataclass(frozen=True)
class Coverage:
    """How much of the exported program was compared, of the calls on which the outputs depend.

    Attributes:
        compared: Nodes whose values were compared.
        covered: Nodes within a call that was compared, or that only move what was compared.
        skipped: The others, with the reason.
        unnamed: Calls whose results are of no node, by function: packed weights, layouts of a kernel, parts of a node.
    """

    compared: int
    covered: int
    skipped: dict[str, str]
    unnamed: dict[str, int]


@dataclass(frozen=True)
class Divergence:
    """The first kernel whose error is not rounding.

    Attributes:
        boundary: Its call.
        confidence: How sure that is.
        reason: The same in a sentence.
        others: Positions of later calls that diverge by themselves.
    """

    boundary: Boundary
    confidence: Confidence
    reason: str
    others: tuple[int, ...]


class Cause(StrEnum):
    """What makes a kernel, or the program that is compiled, wrong."""

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
"""How the operators of a kernel are computed in the experiment that decides for a cause, from the plainest on."""


class ImportWay(StrEnum):
    """How the nodes of a kernel are imported once more, where their import is wrong."""

    RAW = "imported without this project's workarounds"
    ONNX = "imported by the frontend onnx"


@dataclass(frozen=True)
class Experiment:
    """The operators of a kernel, computed in another way.

    Attributes:
        decides: The cause that it shows if it is wrong and the experiments before it are right; see `WAYS`.
        result: Their error, given PyTorch's values; None if they could not be computed so.
        problem: Why they could not be, in one line.
        with_before: Whether the operators of the calls that make the kernel's inputs are computed, too.
        otherwise: Whether they are wrong, and in another way than in the program: that decides nothing.
    """

    decides: Cause
    result: Deviation | None
    problem: str = ""
    with_before: bool = False
    otherwise: bool = False

    @property
    def way(self) -> str:
        """How the operators are computed, in words."""
        return WAYS[self.decides] + (", together with those before it" if self.with_before else "")


class Rerun(StrEnum):
    """How the code of the experiment that decides runs once more."""

    ONE_THREAD = "on one thread"
    UNOPTIMIZED = "without LLVM's optimizations"


@dataclass(frozen=True)
class Retrial:
    """What is wrong, computed once more: the same module is run otherwise, or the nodes are imported otherwise.

    Attributes:
        way: What is different.
        result: The error, given PyTorch's values; None if it could not be made so.
        problem: Why it could not be, in one line.
    """

    way: Rerun | ImportWay
    result: Deviation | None
    problem: str = ""


@dataclass(frozen=True)
class Ablation:
    """The experiments on one kernel and what they show.

    Attributes:
        experiments: In their order, up to the one that is wrong.
        cause: What makes the kernel wrong; `CODE_GENERATION` if the experiment that is wrong is right without LLVM's
            optimizations; where no experiment is wrong, `RUNTIME`, or `SCHEDULE` if the kernel is unsteady; None if the
            last one could not be made.
        reruns: The experiment that is wrong, made again, until it is right.
        imports: Other imports of the same nodes, if the cause is `IMPORTER`.
        passes: If the cause is `FUSION`, the pass of the pipeline before which it is right and after which it is wrong;
            several where nothing between them can be compiled, none where that was not found.
    """

    experiments: tuple[Experiment, ...]
    cause: Cause | None
    reruns: tuple[Retrial, ...] = ()
    imports: tuple[Retrial, ...] = ()
    passes: tuple[str, ...] = ()

    @property
    def wrong(self) -> Cause | None:
        """What the experiment that is wrong decides for; None if none is wrong."""
        last = self.experiments[-1]
        return last.decides if last.result is not None and last.result.excess > 1 else None

    @property
    def mended(self) -> Rerun | ImportWay | None:
        """How the experiment that is wrong is right; None if it stays wrong."""
        return next((again.way for again in self.reruns if again.result and again.result.excess <= 1), None)

    @property
    def reason(self) -> str:
        """Which experiment decided, in words."""
        untold = [f"{made.way}: {made.problem}" for made in self.experiments if made.result is None]
        other = [f", wrong in another way with {made.way}" for made in self.experiments if made.otherwise]
        unknown = f" (not computed with {'; '.join(untold)})" if untold else ""
        if self.cause is None:
            return f"no experiment that could be made is wrong{unknown}"
        if self.wrong is None:
            steady = self.cause is Cause.RUNTIME
            told = "" if steady else ", and the kernel does not always make the same bits: its tasks disturb each other"
            return f"its operators are right in a module of their own{unknown}{told}"
        before = [made.way for made in self.experiments if made.result and made.result.excess <= 1]
        right = "".join([*([f", right with {before[-1]}"] if before else []), *other])
        turned = f", right before the pass {' or '.join(self.passes)} and wrong after it" if self.passes else ""
        told = f"its operators are wrong with {self.experiments[-1].way}{self._reruns}"
        return f"{told}{right}{unknown}{turned}{self._whose}"

    @property
    def takes_before(self) -> bool:
        """Whether the kernel is right by itself, and its fault shows only with what comes before it."""
        return self.wrong is None or self.experiments[-1].with_before

    @property
    def whose(self) -> str:
        """Whose fault a wrong import is, in words; nothing where that is not known."""
        found = {made.way: made.result.excess > 1 for made in self.imports if made.result is not None}
        raw, onnx = found.get(ImportWay.RAW), found.get(ImportWay.ONNX)
        if raw is None:
            return "this project's workarounds: TVM alone does not import it so" if onnx is False else ""
        if not raw:
            return "this project's workarounds"
        if onnx is None:
            return "TVM"
        return "TVM's legalization of the operators, or PyTorch's decomposition" if onnx else "TVM's importer"

    @property
    def _reruns(self) -> str:
        if self.mended is Rerun.ONE_THREAD:
            return f" and right {self.mended}: tasks of a parallel loop change what others read or write"
        return f" and right {self.mended}" if self.mended else ""

    @property
    def _whose(self) -> str:
        if not self.imports:
            return ""
        told = ", ".join(
            f"{made.way} {'not possible' if made.result is None else 'wrong' if made.result.excess > 1 else 'right'}"
            for made in self.imports
        )
        return f"; {told}" + (f": the fault is in {self.whose}" if self.whose else "")


@dataclass(frozen=True)
class Reproduction:
    """What shows the fault of a kernel without this project.

    Attributes:
        files: Contents of its folder by name; nothing if it could not be made.
        told: What it consists of, or why it could not be made; a clause.
    """

    files: Mapping[str, bytes]
    told: str


@dataclass(frozen=True)
class Misshapen:
    """An output of a wrong shape, whose values may be right.

    Attributes:
        output: Its name.
        shape: Its shape.
        expected: PyTorch's.
        node: Name of the first node whose imported value has another shape than PyTorch's; empty if all have the same.
        source: Line of the model's source that the node comes from.
    """

    output: str
    shape: tuple[int, ...]
    expected: tuple[int, ...]
    node: str
    source: str


@dataclass(frozen=True)
class Rewriting:
    """How the program that is compiled computes something else than the model, in PyTorch already.

    Attributes:
        cause: `STRATEGY`, or `EXPORT` if the program is as wrong without the strategy: by torch.export, by PyTorch's
            decomposition, or by a patch that acts while a model is traced.
        source: Line of the model whose value is lost; empty if it is not known.
        by: Line of what is computed instead; empty if it is not known.
        result: The largest error of an output when PyTorch computes the program.
    """

    cause: Cause
    source: str
    by: str
    result: Deviation


@dataclass(frozen=True)
class Diagnosis:
    """What was found about one program of a case.

    Attributes:
        case: The case.
        program: Name of the program.
        boundaries: Every call that was compared, in order.
        outputs: Errors of the outputs, by name, beside those of the model itself.
        coverage: How much of the exported program was compared.
        first: The first kernel that diverges; None if none does.
        changed: Functions whose inputs are not what was written: the memory of these was given away too early.
        altered: Nodes of the weights and inputs whose values in the run are not PyTorch's.
        misshapen: The outputs of a wrong shape.
        unsteady: Functions that do not always make the same bits of the same values.
        luck: Nodes of few numbers that are beyond the limits in a half precision. One run of autocast, to which the
            limits are relative, says nothing about so few (`harness.parity.monte_carlo`): nothing is wrong by them.
        luck_of_outputs: The same of outputs.
        ablation: Why the first kernel that diverges does so.
        reproduction: What shows that, if it was asked for; no part of the JSON.
        failed: The outputs that a verification does not let pass, with its reasons.
        rewriting: How the program that is compiled is not the model; None if it is, or if no output is wrong.
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
        """Whether anything is wrong besides rounding."""
        return self.first is not None or any((self.changed, self.altered, self.misshapen, self.unsteady, self.beyond))

    @property
    def beyond(self) -> list[str]:
        """Names of the outputs that are wrong: their errors are beyond the limits, or a verification refuses them."""
        wrong = (name for name, found in self.outputs.items() if found.excess > 1 or name in self.failed)
        return [name for name in wrong if name not in self.luck_of_outputs]


def first_divergence(boundaries: Sequence[Boundary]) -> Divergence | None:
    """Returns the first call whose local error is not rounding; None if there is none."""
    wrong = [boundary for boundary in boundaries if boundary.local.excess > 1]
    if not wrong:
        return None
    first, *others = wrong
    certain = first.local.excess >= _CERTAIN
    found = (
        f"{first.local.wrong} elements that had to be equal differ"
        if first.local.wrong
        else f"given PyTorch's own inputs, its error is {first.local.r_rms:.3g} times PyTorch's"
    )
    together = f"; it is compared together with {', '.join(first.between)}" if first.between else ""
    return Divergence(
        first,
        Confidence.CERTAIN if certain else Confidence.LIKELY,
        found + together,
        tuple(boundary.position for boundary in others),
    )


def budget(diagnosis: Diagnosis) -> dict[str, float]:
    """Returns the share of each kind of call in the squared errors that all calls make, the largest first.

    A kind is what calls compute. Relative errors are added, so that a call that is amplified later counts like any.
    """
    made: dict[str, float] = {}
    for boundary in diagnosis.boundaries:
        if math.isfinite(boundary.local.error):
            kind = _kind(boundary)
            made[kind] = made.get(kind, 0.0) + boundary.local.error**2
    total = sum(made.values())
    return (
        {kind: part / total for kind, part in sorted(made.items(), key=lambda item: -item[1]) if part} if total else {}
    )


_MOVES = frozenset(
    ("view", "permute", "expand", "clone", "unsqueeze", "squeeze", "getitem", "slice.Tensor", "select.int", "t")
)
"""Operators that only move elements: a call is named after its others."""


def _kind(boundary: Boundary) -> str:
    computing = [name.partition(".")[0] for name in boundary.operators if name not in _MOVES]
    return " ".join(computing[:4]) + (" …" if len(computing) > 4 else "") if computing else "moves"
