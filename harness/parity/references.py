"""Chooses the reference of each precision: PyTorch eager fp32, or upstream under autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.core.precision import DEFAULT_PRECISION, Precision
from harness.core.program import Arrays

if TYPE_CHECKING:
    import torch

SECOND_RUN = "again:"
"""Prefix of the names of outputs of a reference's second run, for outputs in which it differs from the first."""


@dataclass(frozen=True)
class Reference:
    """A way to run PyTorch that produces the reference of a case.

    Attributes:
        kind: Name of its cached arrays.
        code: Module that contains the code, for keys of cached arrays.
        run: Runs a module on its inputs; returns arrays by output name.
    """

    kind: str
    code: str
    run: Callable[[torch.nn.Module, Sequence[torch.Tensor], Sequence[str]], Mapping[str, Any]]


def reference_of(precision: Precision) -> Reference:
    """Returns the reference of a precision: eager fp32, or autocast if the precision is half."""
    if precision.is_half:
        from harness.parity.autocast import half_reference

        return Reference(
            f"autocast {precision.name}", "harness.parity.autocast", partial(half_reference, precision=precision)
        )
    from harness.parity.oracle import reference

    kind = "reference" if precision.name == DEFAULT_PRECISION else f"reference {precision.name}"
    return Reference(kind, "harness.parity.oracle", reference)


def run_twice(run: Callable[[], Arrays]) -> Arrays:
    """Runs twice; returns the first run's arrays and, under `SECOND_RUN`, those of the second that differ bitwise."""
    from harness.parity.metrics import bitwise_different

    first, second = run(), run()
    return first | {
        f"{SECOND_RUN}{name}": second[name]
        for name, array in first.items()
        if array.shape != second[name].shape or bitwise_different(array, second[name])
    }


def split_runs(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Splits the arrays of `run_twice` into those of the first and of the second run."""
    first = {name: array for name, array in arrays.items() if not name.startswith(SECOND_RUN)}
    return first, {name: arrays.get(f"{SECOND_RUN}{name}", array) for name, array in first.items()}
