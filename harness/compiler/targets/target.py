"""Defines a target: one kind of device, this machine's abilities with it, and the pipeline that compiles for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from harness.compiler.schedules import UNTUNED, Schedules
from harness.core.outcome import Kernel
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processors import THIS_MACHINE, Processors

if TYPE_CHECKING:
    import tvm


class MakeTarget(Protocol):
    """A function that makes TVM's target."""

    def __call__(self, processors: Processors = THIS_MACHINE, /) -> tvm.target.Target:
        """Returns the target for processors; raises HarnessError if their name is unknown."""


class RunProblem(Protocol):
    """A function that explains why this machine cannot run compiled code."""

    def __call__(self, processors: Processors = THIS_MACHINE, /) -> str | None:
        """Returns the reason why code for processors does not run here, in one sentence, or None."""


class Pipeline(Protocol):
    """A function that makes the pass from an imported module to a module that is ready for code generation."""

    def __call__(self, target: tvm.target.Target, schedules: Schedules = UNTUNED, /) -> tvm.transform.Pass:
        """Returns the pass for TVM's target; schedules of other kinds of target are ignored."""


Examine = Callable[[str, Mapping[str, int], "tvm.target.Target"], tuple[Kernel, ...]]
"""Returns the kernels of a GPU's generated source, given the threads per block; RuntimeError if no device takes it."""

DeviceCode = Callable[[bytes, "tvm.target.Target"], bytes]
"""Makes a library's device code of the module that TVM generated; RuntimeError if the compiler rejects it."""


@dataclass(frozen=True)
class Target:
    """One kind of device.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        tvm_target: Returns TVM's target for processors; without an argument, for this machine's.
        pipeline: Returns the pass from an imported module to a module that is ready for code generation, tuned or not.
        compile_problem: None if this machine can compile for the target, otherwise the reason in one sentence.
        run_problem: None if this machine can run code for processors, otherwise the reason in one sentence.
        device_type: TVM's name of the kind of device.
        examine: For targets with their own generated source: returns the resources of its kernels and checks their
            limits.
        device_code: For targets whose libraries carry other device code than TVM's.
        architectures: For targets whose libraries run on some devices only: names of their architectures.
        precisions: Names of the precisions that the target compiles in, see `harness.core.precision`.
        tunable: Whether the pipeline takes tuned schedules, and tuning can search for them.
        emulated: Whether this machine's CPU can run the kernels in place of a device (`compiler.execution.executors`).
        symbolic: Whether the pipeline takes inputs with symbolic axes, and makes fast kernels of their readers.
        upsampling: Whether the pipeline convolves an upsampled image without materializing it.
        forkable: Whether a case may run in a fork of a process that has loaded the libraries. A GPU's driver that was
            asked for devices during loading fails in a fork.
    """

    name: str
    summary: str
    tvm_target: MakeTarget
    pipeline: Pipeline
    compile_problem: Callable[[], str | None]
    run_problem: RunProblem
    device_type: str = "cpu"
    examine: Examine | None = None
    device_code: DeviceCode | None = None
    architectures: Callable[[tvm.target.Target], tuple[str, ...]] | None = None
    precisions: tuple[str, ...] = (DEFAULT_PRECISION,)
    tunable: bool = False
    emulated: bool = False
    symbolic: bool = False
    upsampling: bool = False
    forkable: bool = False

    def device(self) -> tvm.runtime.Device:
        """Returns TVM's first device of the kind."""
        import tvm

        return tvm.runtime.device(self.device_type)
