"""The options of pytest's command line that choose the sides and rounds of a suite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.core.processors import THIS_MACHINE, Processors


@dataclass(frozen=True)
class Options:
    """Which sides are measured, and for how long.

    Attributes:
        database: Folder of a tuning database; None for the one that fits this machine.
        untuned: Whether the tuned side is left out.
        peers: Names of the peers that are measured, keys of `perf.peers.PEERS`.
        rounds: Number of rounds; None for as many as the budget of a suite allows.
        processors: The processors that the sides of ours are compiled for.
    """

    database: Path | None = None
    untuned: bool = False
    peers: tuple[str, ...] = ()
    rounds: int | None = None
    processors: Processors = THIS_MACHINE

    def database_for(self, target: str) -> Path | None:
        """Returns the folder of the database for a target; None if the tuned side is left out or no database fits.

        Raises:
            HarnessError: The database cannot be used.
        """
        if self.untuned or self.database is not None:
            return None if self.untuned else self.database
        from harness.tuned.database import default_database

        return default_database(target, self.processors)
