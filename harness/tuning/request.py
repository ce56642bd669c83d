"""The options of `sam3-tvm tune`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.budget import Groups
from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processors import THIS_MACHINE, Processors
from harness.core.remote import Remote
from harness.models.registry import subjects
from harness.models.selection import select
from harness.targets import HOST, TARGETS


@dataclass(frozen=True)
class Request:
    """The components to tune, the limits of the search, and the folder of the database.

    Attributes:
        components: Names of the components; all components if it is empty.
        target: Name of the target.
        scale: `shallow` or `full`; it decides how often each task counts.
        minutes: Time limit in minutes; None for no limit.
        trials: Largest number of schedules to try; None for no limit.
        folder: Folder of the database; None for the one in `fixtures/tuned` that fits this machine.
        seed: Seed of candidates and inputs.
        remote: The device to measure on; None for this machine.
        processors: The processors to compile for.
        precision: Precision of what is tuned.
        float32: By component: groups of products that stay float32 in a half precision.
    """

    components: tuple[str, ...] = ()
    target: str = HOST.name
    scale: str = "shallow"
    minutes: float | None = None
    trials: int | None = None
    folder: Path | None = None
    seed: int = 0
    remote: Remote | None = None
    processors: Processors = THIS_MACHINE
    precision: str = DEFAULT_PRECISION
    float32: Mapping[str, Groups] = field(default_factory=dict)

    def cases(self) -> tuple[Case, ...]:
        """Returns the cases whose components are tuned.

        Raises:
            HarnessError: The options make no sense.
        """
        if self.minutes is not None and not self.minutes > 0:
            raise HarnessError(f"--minutes {self.minutes:g} leaves no time to tune: give more than 0.")
        if self.trials is not None and self.trials < 1:
            raise HarnessError(f"--trials {self.trials} tries nothing: give 1 or more.")
        if self.target in TARGETS and not TARGETS[self.target].tunable:
            tunable = ", ".join(target.name for target in TARGETS.values() if target.tunable)
            raise HarnessError(f"cannot tune for {self.target!r}: there are schedules to search for {tunable} only")
        for name in self.components:
            if name in subjects() and subjects()[name].whole:
                raise HarnessError(f"{name} is no component: tune the components that it is made of")
        chosen = (self.components, (DEFAULT_STRATEGY,), (self.target,), (self.scale,), self.seed, (self.precision,))
        return select(*chosen)
