"""The queue for the model: one call after another, all in one thread, and what each tab is waiting for.

TVM keeps a pool of threads for every thread that calls it, so that all calls come from the same one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

WAITING = "waiting"


@dataclass
class _Call:
    """A call that was not answered yet.

    Attributes:
        owner: The session that waits for it.
        doing: What it does at the moment; `WAITING` until its turn comes.
        since: When that began, in seconds of `time.monotonic`.
    """

    owner: str
    doing: str
    since: float

    def announce(self, doing: str) -> None:
        """Notes what begins now."""
        self.doing, self.since = doing, time.monotonic()


@dataclass(frozen=True)
class Doing:
    """What a session waits for.

    Attributes:
        doing: What the model does for it, or `WAITING`.
        ahead: Calls of all sessions that come first.
        seconds: For how long already.
    """

    doing: str
    ahead: int
    seconds: float


class ModelQueue:
    """Runs calls in their order. Its methods are called in the thread of one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._calls: list[_Call] = []

    async def run(self, owner: str, function: Callable[[Callable[[str], object]], T]) -> T:
        """Runs a function when its turn comes.

        Args:
            owner: The session that asks.
            function: Takes a function that it calls with what it begins to do.
        """
        call = _Call(owner, WAITING, time.monotonic())
        self._calls.append(call)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, call.announce)
        finally:
            self._calls.remove(call)

    def doing(self, owner: str) -> Doing | None:
        """What is done for a session; None if it waits for nothing."""
        for ahead, call in enumerate(self._calls):
            if call.owner == owner:
                return Doing(call.doing, ahead, time.monotonic() - call.since)
        return None

    def close(self) -> None:
        """Drops what has not begun, and waits for the end of what has."""
        self._thread.shutdown(wait=True, cancel_futures=True)
