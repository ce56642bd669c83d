"""A component that faults are put into: built, exported and referenced once, and right without a fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax
from tvm_ffi import StructuralKey

from conformance.calibration.reaching import Reached, content, functions_of, key_of, reached
from conformance.calibration.sources import PATCHES, Place, part_of, places, tracing
from conformance.support import recurrent_segmenter
from conformance.support.diagnosed import block_program, rotary_program
from harness.compiler.lowering.frontends.torch_export.importing import nodes_of
from harness.compiler.lowering.frontends.torch_export.lifting import Graph
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.lowering.route import Lowered, Route
from harness.compiler.schedules.common.origins import bindings_of
from harness.compiler.targets import HOST
from harness.core.case import Case
from harness.core.outcome import VerdictKind
from harness.core.program import Arrays, Program
from harness.core.settings import SEEDED
from harness.models.registry import models, subjects
from harness.parity.oracle import oracle, reference
from harness.parity.references import Reference
from harness.parity.verdict import judge
from harness.runtime.executable import Executable
from harness.verify.diagnose.diagnosis import Diagnosis
from harness.verify.diagnose.runner import diagnose_program

SMALL = ("box_head", "scoring_head", "object_pointers", "prompt_encoder", "mask_pointer", "mask_decoder")
"""Components of SAM 3 that compile in seconds."""
OWN = ("block", "clip", *(f"rotary {strategy}" for strategy in STRATEGIES if strategy != "none"))
"""Small models of the test suite; the last are a rotary attention of SAM 3 with each strategy."""
PATCHED = ("transformer_decoder",)
"""A component of SAM 3 whose code patches replace, so that they run while it is exported."""
COMPONENTS = (*OWN, *SMALL, *PATCHED)


@dataclass(frozen=True)
class Operator:
    """One operator of the imported module.

    Attributes:
        name: Name of the Relax operator.
        key: Its name with the types of what it reads: what makes calls of it alike.
        node: The node whose value it computes, or helps to compute.
    """

    name: str
    key: str
    node: str


@dataclass(frozen=True)
class Prepared:
    """A component without a fault.

    Attributes:
        case: How it is lowered.
        program: The program.
        exported: What `Route.export` made of it.
        graph: Its nodes.
        lowered: The imported module.
        reference: PyTorch's outputs.
        again: Those of a second run.
        oracle: Float64's outputs.
        reached: The operators that the pipeline comes to.
        places: The places in the project's source files that lowering and running it come to, and those in patches
            that building it comes to.
    """

    case: Case
    program: Program
    exported: Any
    graph: Graph
    lowered: Lowered
    reference: Reference
    reached: Reached = field(default_factory=Reached)
    places: list[Place] = field(default_factory=list)

    @cached_property
    def operators(self) -> list[Operator]:
        """The operators of the imported module, in order."""
        node_of = {variable: node for node, variable in reversed(list(nodes_of(self.lowered.module).items()))}
        main = relax.transform.CanonicalizeBindings()(self.lowered.module)["main"]
        found: list[Operator] = []
        node = ""
        for binding in reversed(list(bindings_of(main))):
            node = node_of.get(binding.var.name, node)
            if isinstance(binding.value, ir.Call) and isinstance(binding.value.op, ir.Op):
                found.append(Operator(binding.value.op.name, key_of(binding.value), node))
        return found[::-1]

    def nodes(self, key: str) -> frozenset[str]:
        """Returns the nodes that operators of a key compute."""
        return frozenset(operator.node for operator in self.operators if operator.key == key)


def built_anew(component: Prepared) -> Prepared:
    """Returns a component that is built again, with its references, as by the code that is there now."""
    program = _program(component.case)
    return replace(component, program=program, reference=_expected(program))


def _expected(program: Program) -> Reference:
    """Returns PyTorch's outputs of two runs, and float64's."""
    inputs, names = tuple(program.example.values()), program.outputs
    first, again = (reference(program.module, inputs, names) for _ in range(2))
    return Reference(first, again, oracle(program.module, inputs, names))


@dataclass
class Observed:
    """What a run of the compiled program showed, before its calls were compared.

    Attributes:
        code: The lowered module, to be compared; None until it was compiled.
        functions: Its functions by name, likewise.
        outputs: Its outputs.
    """

    code: StructuralKey | None = None
    functions: dict[str, StructuralKey] = field(default_factory=dict)
    outputs: Arrays | None = None

    def run(self, prepared: Prepared, code: tvm.IRModule, library: Path, weights: Sequence[np.ndarray]) -> None:
        """Runs the library as verify does."""
        self.code = StructuralKey(code)
        self.functions = {name: content(code[variable]) for name, variable in functions_of(code).items()}
        program = Executable(library, HOST.device(), weights)
        results = program.run([value.numpy() for value in prepared.program.example.values()])
        self.outputs = dict(zip(prepared.program.outputs, (array.copy() for array in results), strict=True))


@contextmanager
def prepared(component: str) -> Iterator[tuple[Prepared, Observed]]:
    """Yields a component, and what its run shows without a fault.

    Raises:
        RuntimeError: It is not right without a fault, so that nothing can be learned.
    """
    name, _, strategy = component.partition(" ")
    case = Case(name, strategy or ("lowering" if name == "clip" else "real"), HOST.name)
    with models()["sam3"].context():
        with tracing() as lines_of_building:
            program = _program(case)
        inputs = tuple(program.example.values())
        route = Route.from_case(case)
        with tracing() as lines:
            exported = route.export(program.module, inputs, program.axes)
        expected = _expected(program)
        with tracing() as lines_of_import:
            lowered = route.lower(exported, program.module)
        made = Prepared(case, program, exported, route.graph(exported), lowered, expected)
        observed = Observed()
        with reached([operator.name for operator in made.operators]) as operators:
            found = followed(made, lambda *compiled: observed.run(made, *compiled))
        with tracing() as rest, suppress(Interrupted):
            followed(made, interrupt)
        of_patches = {file: more for file, more in lines_of_building.items() if part_of(file) == PATCHES}
        for file, more in (*lines_of_import.items(), *rest.items(), *of_patches.items()):
            lines[file] |= more
        verdicts = judge(observed.outputs or {}, made.reference)
        wrong = [verdict.reason for verdict in verdicts if verdict.kind is not VerdictKind.STRICT]
        if wrong or found.faulty:
            raise RuntimeError(f"{component} is not right without a fault: {(wrong or ['a kernel diverges'])[0]}")
        yield replace(made, reached=operators, places=places(lines)), observed


class Interrupted(Exception):
    """A program is compiled, and need not run."""


def interrupt(*_compiled: Any) -> None:
    """Ends a diagnosis where its program is compiled."""
    raise Interrupted


def followed(
    component: Prepared,
    compiled: Callable[..., None],
    announce: Callable[[str], None] = lambda stage: None,
    *,
    reproduce: bool = False,
    exported_anew: bool = False,
) -> Diagnosis:
    """Diagnoses a component; see `diagnose_program`. It is exported once for all faults, unless it is to be anew."""
    return diagnose_program(
        component.program,
        component.case,
        SEEDED,
        on_stage=announce,
        reproduce=reproduce,
        exported=None if exported_anew else component.exported,
        on_compiled=compiled,
    )


def _program(case: Case) -> Program:
    if case.component == "block":
        return block_program()
    if case.component == "rotary":
        return rotary_program()
    if case.component == "clip":
        workload = recurrent_segmenter.open_clip(case, SEEDED)
        (program,) = workload.programs.values()
        frame, memory = workload.trace[0].arguments
        return replace(program, example={"frame": frame, "memory": memory})
    return next(iter(subjects()[case.component].open(case, SEEDED).programs.values()))
