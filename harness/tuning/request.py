"""What `sam3-tvm tune` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.targets import HOST


@dataclass(frozen=True)
class Request:
    """What to tune, for how long, and where to keep what is found.

    Attributes:
        components: Their names; all if there is none.
        target: Name of the target.
        scale: `shallow` or `full`: decides how often each task counts.
        minutes: When to stop; None for no limit.
        trials: How many schedules to try at most; None for no limit.
        folder: The database; None for the one in `fixtures/tuned` that fits.
        seed: Of candidates and inputs.
        remote: HOST:PORT of an RPC tracker; None to measure here.
        key: What servers are known by at the tracker.
    """

    components: tuple[str, ...] = ()
    target: str = HOST.name
    scale: str = "shallow"
    minutes: float | None = None
    trials: int | None = None
    folder: Path | None = None
    seed: int = 0
    remote: str | None = None
    key: str = ""
