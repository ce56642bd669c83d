"""Target: one kind of device, what this machine can do with it, and the pipeline that compiles for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from harness.core.outcome import Kernel
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processors import THIS_MACHINE, Processors
from harness.schedules import UNTUNED, Schedules

if TYPE_CHECKING:
    import tvm


class MakeTarget(Protocol):
    """Makes TVM's target."""

    def __call__(self, processors: Processors = THIS_MACHINE, /) -> tvm.target.Target:
        """The target for processors; HarnessError if there are none of such a name."""


class RunProblem(Protocol):
    """Says why this machine cannot run compiled code."""

    def __call__(self, processors: Processors = THIS_MACHINE, /) -> str | None:
        """The reason why code for processors does not run here, in one sentence, or None."""


class Pipeline(Protocol):
    """Makes the pass that turns an imported module into one that is ready for code generation."""

    def __call__(self, target: tvm.target.Target, schedules: Schedules = UNTUNED, /) -> tvm.transform.Pass:
        """Returns the pass for TVM's target; what tuning found for other kinds of target is left alone."""


class Examine(Protocol):
    """Reads what became of a GPU target's kernels, and refuses those that no device would take."""

    def __call__(self, source: str, threads: Mapping[str, int], target: tvm.target.Target, /) -> tuple[Kernel, ...]:
        """Examines the kernels of generated source, given the threads per block; RuntimeError for a violation."""


class DeviceCode(Protocol):
    """Makes what a library carries for the device of what TVM generated for it."""

    def __call__(self, saved: bytes, target: tvm.target.Target, /) -> bytes:
        """Returns what the library carries for the device; RuntimeError where the compiler rejects the module."""


@dataclass(frozen=True)
class Target:
    """One place to run.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        tvm_target: Makes TVM's target for processors; without an argument, for those of this machine.
        pipeline: The pass that turns an imported module into one that is ready for code generation, tuned or not.
        compile_problem: None if this machine can compile for the target, otherwise the reason in one sentence.
        run_problem: None if this machine can run code for processors, otherwise the reason in one sentence.
        device: TVM's device to run on.
        examine: For targets with a generated source of their own: what its kernels use and whether they are allowed.
        device_code: For targets whose libraries carry something else for the device than TVM puts there.
        architectures: For targets whose libraries run on some devices only: names of their architectures.
        precisions: Names of the precisions that it compiles in, see `harness.core.precision`.
        tunable: Whether its pipeline takes schedules that tuning found, and tuning can search for some.
        emulated: Whether this machine's CPU can run its kernels in place of a device, see `harness.execution.emulated`.
        symbolic: Whether its pipeline takes inputs with symbolic axes, and makes fast kernels of what reads them.
        upsampling: Whether its pipeline convolves an upsampled image without making it first.
        forkable: Whether a case of it may run in a fork of a process that has loaded the libraries. A GPU's driver that
            was asked for devices while they were loaded fails in one.
    """

    name: str
    summary: str
    tvm_target: MakeTarget
    pipeline: Pipeline
    compile_problem: Callable[[], str | None]
    run_problem: RunProblem
    device: Callable[[], tvm.runtime.Device]
    examine: Examine | None = None
    device_code: DeviceCode | None = None
    architectures: Callable[[tvm.target.Target], tuple[str, ...]] | None = None
    precisions: tuple[str, ...] = (DEFAULT_PRECISION,)
    tunable: bool = False
    emulated: bool = False
    symbolic: bool = False
    upsampling: bool = False
    forkable: bool = False
