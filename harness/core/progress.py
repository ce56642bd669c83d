"""Records the progress of a case: its stage, the time of each stage, and the artifacts made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from harness.core.outcome import CaseError, Device, Kernel, Outcome, Stage, Status, Verdict


@dataclass
class Progress:
    """The current stage of a case, the time of each stage, the sizes of artifacts, and the device that ran it."""

    on_stage: Callable[[str], None]
    stage: Stage = Stage.BUILD
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    device: Device | None = None
    kernels: list[Kernel] = field(default_factory=list)
    lost_schedules: list[str] = field(default_factory=list)
    emulated: bool = False

    @contextmanager
    def time_stage(self, stage: Stage) -> Iterator[None]:
        """Announces the stage, and adds its duration if it ends without an error."""
        self.stage = stage
        self.on_stage(stage.value)
        start = time.perf_counter()
        yield
        self.seconds[stage.value] = self.seconds.get(stage.value, 0.0) + time.perf_counter() - start

    @contextmanager
    def time_steps(self, stage_of: Callable[[str], Stage]) -> Iterator[Callable[[str], None]]:
        """Yields a callback for the steps of a task; each step is a stage that ends where the next begins."""
        with ExitStack() as current:

            def on_step(step: str) -> None:
                current.close()
                current.enter_context(self.time_stage(stage_of(step)))

            yield on_step

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
