"""The reference of each precision: PyTorch eager fp32, or upstream under autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.core.precision import DEFAULT_PRECISION, Precision
from harness.core.program import Arrays

if TYPE_CHECKING:
    import torch

AGAIN = "again:"
"""Prefix under which the second run of a reference is kept, for the outputs in which it differs from the first."""


@dataclass(frozen=True)
class Reference:
    """How PyTorch is run to make what a case is held to.

    Attributes:
        kind: What cached arrays of it are called.
        code: The module that runs it, for keys of cached arrays.
        run: Runs a module on its inputs; arrays by the names of its outputs.
    """

    kind: str
    code: str
    run: Callable[[torch.nn.Module, Sequence[torch.Tensor], Sequence[str]], Mapping[str, Any]]


def reference_of(precision: Precision) -> Reference:
    """Returns the reference of a precision: eager fp32, or under autocast where the precision is half."""
    if precision.is_half:
        from harness.parity.autocast import half_reference

        return Reference(
            f"autocast {precision.name}", "harness.parity.autocast", partial(half_reference, precision=precision)
        )
    from harness.parity.oracle import reference

    kind = "reference" if precision.name == DEFAULT_PRECISION else f"reference {precision.name}"
    return Reference(kind, "harness.parity.oracle", reference)


def run_twice(run: Callable[[], Arrays]) -> Arrays:
    """Runs twice; returns the first run's arrays and, under `AGAIN`, those of the second that differ bitwise."""
    from harness.parity.metrics import bitwise_different

    first, second = run(), run()
    return first | {
        f"{AGAIN}{name}": second[name]
        for name, array in first.items()
        if array.shape != second[name].shape or bitwise_different(array, second[name])
    }


def first_and_again(both: Arrays) -> tuple[Arrays, Arrays]:
    """Returns the two runs of `run_twice`."""
    first = {name: array for name, array in both.items() if not name.startswith(AGAIN)}
    return first, {name: both.get(f"{AGAIN}{name}", array) for name, array in first.items()}
