"""The ways to compile a piece of a program and run it: with nothing of this project, with more, with all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import ir, relax

from harness.diagnose.diagnosis import Cause
from harness.diagnose.flow import BeforeMemory
from harness.diagnose.pieces import Piece, module_of, unsaid_extents, values_read, without_weights
from harness.diagnose.unwritten import filling, results_of
from harness.files import temporary_folder
from harness.runtime.executable import Executable
from harness.schedules.common.origins import bindings_of
from harness.schedules.common.vm import lower_to_vm
from harness.targets.compiling import LIBRARY_SUFFIX, build_library

if TYPE_CHECKING:
    import numpy.typing as npt

    from harness.schedules import Schedules
    from harness.targets.target import Target

    Array = npt.NDArray[Any]

Run = Callable[[tvm.IRModule, Sequence["Array"]], list["Array"]]
"""Compiles a module, and calls its `main` with values of all its parameters."""


@dataclass(frozen=True)
class Compiler:
    """What a program is compiled for.

    Attributes:
        target: The target.
        tvm_target: The same as TVM's.
        schedules: What tuning found.
    """

    target: Target
    tvm_target: tvm.target.Target
    schedules: Schedules

    def unoptimized(self) -> Compiler:
        """Returns a compiler that makes the same modules and generates code from them without LLVM's optimizations."""
        return replace(self, tvm_target=tvm.target.Target({**self.tvm_target.export(), "opt-level": 0}))

    def result(self, piece: Piece, way: Cause) -> list[Array]:
        """Compiles a piece as the experiment that decides for a cause does, and returns its one result in a list."""
        if way is Cause.IMPORTER:
            return self.run_plainly(piece.module, piece.arguments)
        if way is Cause.LEGALIZATION:
            return self._run(self.legalized(piece.module), lower_to_vm(), piece.arguments, len(piece.arguments))
        if way is Cause.SCHEDULE:
            return _one_by_one(piece, self.run)
        return self.run(piece.module, piece.arguments)

    def run_plainly(self, module: tvm.IRModule, arguments: Sequence[Array]) -> list[Array]:
        """Compiles a module as TVM does by default."""
        return self._run(
            without_weights(module), relax.get_default_pipeline(self.tvm_target), arguments, len(arguments)
        )

    def legalized(self, module: tvm.IRModule) -> tvm.IRModule:
        """Returns a module after this project's legalizations, loops as they come, its weights ordinary inputs."""
        from harness.schedules.cpu.pipeline import LEGALIZE

        return relax.transform.LegalizeOps(dict(LEGALIZE))(without_weights(module))

    def run(self, module: tvm.IRModule, arguments: Sequence[Array]) -> list[Array]:
        """Compiles a module as the program is compiled."""
        pipeline = self.target.pipeline(self.tvm_target, self.schedules)
        return self._run(module, pipeline, arguments, int(module["main"].attrs["num_input"]))

    def _run(
        self, module: tvm.IRModule, pipeline: tvm.transform.Pass, arguments: Sequence[Array], inputs: int
    ) -> list[Array]:
        """Lowers a module, generates code and runs it; the arguments after the first `inputs` are weights."""
        kept = BeforeMemory()
        with self.tvm_target, tvm.transform.PassContext(opt_level=3, instruments=[kept]):
            lowered = pipeline(module)
        with temporary_folder("diagnose") as folder:
            library = Path(folder) / f"piece{LIBRARY_SUFFIX}"
            build_library(lowered, self.tvm_target, library)
            instrument = filling(results_of(kept.module))
            return Executable(library, self.target.device(), arguments[inputs:], instrument).run(arguments[:inputs])

    def after_each_pass(self, piece: Piece) -> Iterator[tuple[str, Callable[[], list[Array]]]]:
        """Yields the passes of the pipeline by name, each with what runs a piece after it and with none of the others.

        What is left to do is done by this project's legalizations and TVM's own passes.
        """
        from harness.schedules.cpu.pipeline import LEGALIZE, loop_passes

        module = piece.module
        rest = tvm.transform.Sequential([relax.transform.LegalizeOps(dict(LEGALIZE)), lower_to_vm()])
        for made in loop_passes(module, self.tvm_target, self.schedules):
            with self.tvm_target, tvm.transform.PassContext(opt_level=3):
                module = made(module)
            yield str(made.info.name), partial(self._run_after, rest, module, piece)
        yield "PlanMemory", lambda: self.run(piece.module, piece.arguments)

    def _run_after(self, rest: tvm.transform.Pass, module: tvm.IRModule, piece: Piece) -> list[Array]:
        return self._run(module, rest, piece.arguments, piece.inputs)


def _one_by_one(piece: Piece, run: Run) -> list[Array]:
    """Computes each operator in a module of its own, from the results of those before."""
    main = piece.module["main"]
    weights = {parameter.name for parameter in main.params[piece.inputs :]}
    values: dict[relax.Var, Any] = dict(zip(main.params, piece.arguments, strict=True))
    for binding in bindings_of(main):
        value, variable = binding.value, binding.var
        if isinstance(value, ir.Call):
            parameters = sorted(values_read(value), key=lambda used: used.name in weights)
            unsaid = unsaid_extents([binding], parameters)
            varies = any(used.name not in weights for used in parameters)
            single = module_of(piece.module, [binding], variable, [*unsaid, *parameters], weights if varies else ())
            weights |= set() if varies else {variable.name}
            sizes = [np.zeros(piece.extents[extent.name], np.uint8) for extent in unsaid]
            outputs = run(single, [*sizes, *(values[used] for used in parameters)])
            values[variable] = outputs if isinstance(variable.ty, relax.TupleType) else outputs[0]
        else:
            values[variable] = _taken(value, values)
    return list(values[main.body.body])


def _taken(value: Any, values: dict[relax.Var, Any]) -> Any:
    """Returns the value of a tuple, of a part of one, of a variable or of a constant."""
    if isinstance(value, relax.Tuple):
        return [_taken(part, values) for part in value.fields]
    if isinstance(value, relax.TupleGetItem):
        return values[value.tuple_value][value.index]
    return value.value.numpy() if isinstance(value, ir.GenericConst) else values[value]
