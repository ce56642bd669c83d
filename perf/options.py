"""The options of pytest's command line that choose the sides and rounds of a suite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.core.budget import NO_GROUPS, Groups, read_budgets
from harness.core.case import Case
from harness.core.processors import THIS_MACHINE, Processors
from harness.models.registry import subjects


@dataclass(frozen=True)
class Options:
    """Which sides are measured, and for how long.

    Attributes:
        database: Folder of a tuning database; None for the one that fits this machine.
        untuned: Whether the tuned side is left out.
        peers: Names of the peers that are measured, keys of `perf.peers.PEERS`.
        rounds: Number of rounds; None for as many as the budget of a suite allows.
        processors: The processors that the sides of ours are compiled for.
        budgets: Files of budgets: which products stay float32 in a half precision.
    """

    database: Path | None = None
    untuned: bool = False
    peers: tuple[str, ...] = ()
    rounds: int | None = None
    processors: Processors = THIS_MACHINE
    budgets: tuple[Path, ...] = ()

    def float32(self, case: Case) -> Groups:
        """Returns the groups of products that stay float32 in a case.

        Raises:
            HarnessError: A file is no budget, or is for another precision, scale or target.
        """
        groups = NO_GROUPS
        for file, budget in read_budgets(self.budgets).items():
            if budget.component == case.component:
                budget.check_fits(case, subjects()[case.component].model, file)
                groups = groups.union(budget.float32)
        return groups

    def database_for(self, target: str) -> Path | None:
        """Returns the folder of the database for a target; None if the tuned side is left out or no database fits.

        Raises:
            HarnessError: The database cannot be used.
        """
        if self.untuned or self.database is not None:
            return None if self.untuned else self.database
        from harness.compiler.tuned.database import default_database

        return default_database(target, self.processors)
