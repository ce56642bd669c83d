"""Compiles and runs subgraphs of a program with none, some or all of this project."""

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
from harness.diagnose.flow import ModuleBeforeMemoryPlanning
from harness.diagnose.pieces import Subgraph, free_extents, read_variables, replace_main, weights_to_inputs
from harness.diagnose.unwritten import fill_instrument, result_counts
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
    """The target and schedules that a program is compiled for.

    Attributes:
        target: The target.
        tvm_target: TVM's target.
        schedules: Tuned schedules.
    """

    target: Target
    tvm_target: tvm.target.Target
    schedules: Schedules

    def unoptimized(self) -> Compiler:
        """Returns a compiler that builds the same modules, without LLVM's optimizations."""
        return replace(self, tvm_target=tvm.target.Target({**self.tvm_target.export(), "opt-level": 0}))

    def result(self, subgraph: Subgraph, way: Cause) -> list[Array]:
        """Compiles a subgraph as the experiment on a cause does, and returns its one result in a list."""
        if way is Cause.IMPORTER:
            return self.run_with_defaults(subgraph.module, subgraph.arguments)
        if way is Cause.LEGALIZATION:
            return self._run(self.legalize(subgraph.module), lower_to_vm(), subgraph.arguments, len(subgraph.arguments))
        if way is Cause.SCHEDULE:
            return _run_separately(subgraph, self.run)
        return self.run(subgraph.module, subgraph.arguments)

    def run_with_defaults(self, module: tvm.IRModule, arguments: Sequence[Array]) -> list[Array]:
        """Compiles a module with TVM's default pipeline, and runs it."""
        return self._run(
            weights_to_inputs(module), relax.get_default_pipeline(self.tvm_target), arguments, len(arguments)
        )

    def legalize(self, module: tvm.IRModule) -> tvm.IRModule:
        """Returns a module after this project's legalizations, with unscheduled loops and weights as inputs."""
        from harness.schedules.cpu.pipeline import LEGALIZE

        return relax.transform.LegalizeOps(dict(LEGALIZE))(weights_to_inputs(module))

    def run(self, module: tvm.IRModule, arguments: Sequence[Array]) -> list[Array]:
        """Compiles a module as the program is compiled, and runs it."""
        pipeline = self.target.pipeline(self.tvm_target, self.schedules)
        return self._run(module, pipeline, arguments, int(module["main"].attrs["num_input"]))

    def _run(
        self, module: tvm.IRModule, pipeline: tvm.transform.Pass, arguments: Sequence[Array], num_inputs: int
    ) -> list[Array]:
        """Lowers a module, generates code and runs it; the arguments after the first `num_inputs` are weights."""
        before_memory = ModuleBeforeMemoryPlanning()
        with self.tvm_target, tvm.transform.PassContext(opt_level=3, instruments=[before_memory]):
            lowered = pipeline(module)
        with temporary_folder("diagnose") as folder:
            library = Path(folder) / f"piece{LIBRARY_SUFFIX}"
            build_library(lowered, self.tvm_target, library)
            instrument = fill_instrument(result_counts(before_memory.module))
            return Executable(library, self.target.device(), arguments[num_inputs:], instrument).run(
                arguments[:num_inputs]
            )

    def after_each_pass(self, subgraph: Subgraph) -> Iterator[tuple[str, Callable[[], list[Array]]]]:
        """Yields each pass of the pipeline by name, with a function that runs a subgraph without the later passes.

        This project's legalizations and TVM's own passes replace the later passes.
        """
        from harness.schedules.cpu.pipeline import LEGALIZE, loop_passes

        module = subgraph.module
        remaining = tvm.transform.Sequential([relax.transform.LegalizeOps(dict(LEGALIZE)), lower_to_vm()])
        for next_pass in loop_passes(module, self.tvm_target, self.schedules):
            with self.tvm_target, tvm.transform.PassContext(opt_level=3):
                module = next_pass(module)
            yield str(next_pass.info.name), partial(self._run_after, remaining, module, subgraph)
        yield "PlanMemory", lambda: self.run(subgraph.module, subgraph.arguments)

    def _run_after(self, remaining: tvm.transform.Pass, module: tvm.IRModule, subgraph: Subgraph) -> list[Array]:
        return self._run(module, remaining, subgraph.arguments, subgraph.num_inputs)


def _run_separately(subgraph: Subgraph, run: Run) -> list[Array]:
    """Computes each operator in a separate module, from the results of the operators before."""
    main = subgraph.module["main"]
    weights = {parameter.name for parameter in main.params[subgraph.num_inputs :]}
    values: dict[relax.Var, Any] = dict(zip(main.params, subgraph.arguments, strict=True))
    for binding in bindings_of(main):
        value, variable = binding.value, binding.var
        if isinstance(value, ir.Call):
            parameters = sorted(read_variables(value), key=lambda read: read.name in weights)
            free = free_extents([binding], parameters)
            depends_on_inputs = any(read.name not in weights for read in parameters)
            single = replace_main(
                subgraph.module, [binding], variable, [*free, *parameters], weights if depends_on_inputs else ()
            )
            weights |= set() if depends_on_inputs else {variable.name}
            sizes = [np.zeros(subgraph.extents[extent.name], np.uint8) for extent in free]
            outputs = run(single, [*sizes, *(values[read] for read in parameters)])
            values[variable] = outputs if isinstance(variable.ty, relax.TupleType) else outputs[0]
        else:
            values[variable] = _evaluate(value, values)
    return list(values[main.body.body])


def _evaluate(value: Any, values: dict[relax.Var, Any]) -> Any:
    """Returns the value of a tuple, of a member of one, of a variable or of a constant."""
    if isinstance(value, relax.Tuple):
        return [_evaluate(member, values) for member in value.fields]
    if isinstance(value, relax.TupleGetItem):
        return values[value.tuple_value][value.index]
    return value.value.numpy() if isinstance(value, ir.GenericConst) else values[value]
