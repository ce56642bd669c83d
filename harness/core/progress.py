"""Progress of a case: which stage it is in, how long each took, and what was made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from harness.core.outcome import CaseError, Device, Kernel, Outcome, Stage, Status, Verdict


@dataclass
class Progress:
    """Where the case is, how long each stage took, how large its artifacts are, and which device ran it."""

    announce: Callable[[str], None]
    stage: Stage = Stage.BUILD
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    device: Device | None = None
    kernels: list[Kernel] = field(default_factory=list)
    lost_schedules: list[str] = field(default_factory=list)
    emulated: bool = False

    @contextmanager
    def during(self, stage: Stage) -> Iterator[None]:
        """Announces the stage, and adds up its time if it ends well."""
        self.stage = stage
        self.announce(stage.value)
        start = time.perf_counter()
        yield
        self.seconds[stage.value] = self.seconds.get(stage.value, 0.0) + time.perf_counter() - start

    @contextmanager
    def announced(self, stage_of: Callable[[str], Stage]) -> Iterator[Callable[[str], None]]:
        """Yields what work calls to announce its steps: each is a stage, which ends where the next begins."""
        with ExitStack() as current:

            def announce(step: str) -> None:
                current.close()
                current.enter_context(self.during(stage_of(step)))

            yield announce

    def outcome(self, status: Status, error: CaseError | None = None, verdicts: tuple[Verdict, ...] = ()) -> Outcome:
        """Returns the outcome of a case that ends here."""
        return Outcome(
            self.stage,
            status,
            error,
            self.seconds,
            self.sizes,
            verdicts=verdicts,
            device=self.device,
            kernels=tuple(self.kernels),
            emulated=self.emulated,
            lost_schedules=tuple(self.lost_schedules),
        )
