"""Defines references, PyTorch's outputs of two runs and in float64, and runs traces of PyTorch's modules for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.core.precision import DEFAULT_PRECISION, Precision
from harness.core.program import Arrays, Call, Output, Program, Trace

if TYPE_CHECKING:
    import torch

RunModule = Callable[["torch.nn.Module", "Sequence[torch.Tensor]", Sequence[str]], Mapping[str, Any]]
"""Runs a module on its inputs; returns arrays by output name, as `harness.parity.oracle.reference` does."""


@dataclass(frozen=True)
class Runner:
    """A way to run PyTorch that produces the reference of a precision.

    Attributes:
        kind: Name of its cached arrays.
        code: Module that contains the code, for keys of cached arrays.
        run: Runs a module.
    """

    kind: str
    code: str
    run: RunModule


def runner_of(precision: Precision) -> Runner:
    """Returns the runner of a precision: PyTorch eager fp32, or upstream under autocast if the precision is half."""
    if precision.is_half:
        from harness.parity.autocast import half_reference

        return Runner(
            f"autocast {precision.name}", "harness.parity.autocast", partial(half_reference, precision=precision)
        )
    from harness.parity.oracle import reference

    kind = "reference" if precision.name == DEFAULT_PRECISION else f"reference {precision.name}"
    return Runner(kind, "harness.parity.oracle", reference)


def run_trace(programs: Mapping[str, Program], trace: Trace, run: RunModule) -> Arrays:
    """Runs a trace of PyTorch modules; each call gets the outputs of earlier calls of the same run.

    Args:
        programs: Programs by name.
        trace: The calls.
        run: Runs a module in fp32, under autocast, or in float64.
    """
    import torch

    outputs: Arrays = {}
    results: dict[tuple[str, str], Any] = {}
    for call in trace:
        program = programs[call.program]
        inputs = [
            torch.from_numpy(results[value.call, value.name]) if isinstance(value, Output) else value
            for value in call.arguments
        ]
        for name, array in run(program.module, inputs, program.outputs).items():
            outputs[f"{call.prefix}{name}"] = results[call.name, name] = array
    return outputs


def independent_calls(
    samples: Mapping[str, Mapping[str, torch.Tensor]], programs: Mapping[str, str]
) -> tuple[Call, ...]:
    """Returns one call for each sample; the main sample's outputs have no prefix.

    Args:
        samples: Inputs by sample name; the first sample is the main one.
        programs: The name of the program of each sample.
    """
    main = next(iter(samples))
    return tuple(
        Call(name, programs[name], tuple(args.values()), "" if name == main else f"{name}/")
        for name, args in samples.items()
    )


@dataclass(frozen=True)
class Reference:
    """PyTorch's outputs by name, to which those of compiled code are held.

    Attributes:
        first: Outputs of the first run: PyTorch eager fp32 on the CPU, or PyTorch under autocast in half precision.
        again: Outputs of the second run.
        exact: Outputs in float64 (complex128 of complex ones; integers and booleans unchanged); empty where they are
            not computed.
    """

    first: Arrays
    again: Arrays
    exact: Arrays = field(default_factory=dict)

    @classmethod
    def run_twice(cls, run: Callable[[], Arrays]) -> Reference:
        """Runs twice, without float64."""
        return cls(run(), run())

    @classmethod
    def from_run(cls, outputs: Arrays, exact: Arrays | None = None) -> Reference:
        """Returns the reference of a single run, whose repeatability is not checked."""
        return cls(outputs, outputs, exact or {})

    def part(self, name: str) -> Reference:
        """Returns the outputs whose names begin with `name/`, without that."""
        return self.map(lambda arrays: select(arrays, name))

    def map(self, function: Callable[[Arrays], Arrays]) -> Reference:
        """Returns what a function makes of the outputs of each run."""
        return Reference(function(self.first), function(self.again), function(self.exact))

    def to_arrays(self) -> Arrays:
        """Returns the arrays that a cache keeps; of the second run, those that differ from the first run's bitwise."""
        from harness.parity.metrics import bitwise_different

        different = {
            name: array
            for name, array in self.again.items()
            if array is not self.first[name]
            and (array.shape != self.first[name].shape or bitwise_different(self.first[name], array))
        }
        return add_prefix("first", self.first) | add_prefix("again", different) | add_prefix("exact", self.exact)

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Reference:
        """Returns the reference of which a cache kept these arrays."""
        first, again, exact = (select(arrays, kind) for kind in ("first", "again", "exact"))
        return cls(first, first | again, exact)


def select(arrays: Arrays, prefix: str) -> Arrays:
    """Returns the arrays whose names begin with a prefix and a slash, under the rest of their names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def add_prefix(prefix: str, arrays: Arrays) -> Arrays:
    """Returns the arrays under names that begin with a prefix and a slash."""
    return {f"{prefix}/{name}": array for name, array in arrays.items()}
