"""Queues the calls of the model, which run one after another in one thread, and reports what each tab waits for.

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
class _PendingCall:
    """A call that has not returned.

    Attributes:
        owner: The session that waits for it.
        doing: Its current activity; `WAITING` until its turn comes.
        since: The start of this activity, in seconds of `time.monotonic`.
    """

    owner: str
    doing: str
    since: float

    def announce(self, doing: str) -> None:
        """Notes an activity that starts now."""
        self.doing, self.since = doing, time.monotonic()


@dataclass(frozen=True)
class QueueStatus:
    """The status of a session's call.

    Attributes:
        doing: The activity of the model, or `WAITING`.
        ahead: Number of calls of all sessions that come first.
        seconds: Duration of the activity so far.
    """

    doing: str
    ahead: int
    seconds: float


class ModelQueue:
    """Runs calls in their order. Its methods are called in the thread of one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._calls: list[_PendingCall] = []

    async def run(self, owner: str, function: Callable[[Callable[[str], object]], T]) -> T:
        """Runs a function when its turn comes.

        Args:
            owner: The session that calls.
            function: Takes a function that it calls with each activity that it starts.
        """
        call = _PendingCall(owner, WAITING, time.monotonic())
        self._calls.append(call)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, call.announce)
        finally:
            self._calls.remove(call)

    def status(self, owner: str) -> QueueStatus | None:
        """Returns the status of a session's call; None if the session waits for nothing."""
        for ahead, call in enumerate(self._calls):
            if call.owner == owner:
                return QueueStatus(call.doing, ahead, time.monotonic() - call.since)
        return None

    def close(self) -> None:
        """Cancels the calls that have not started, and waits for the running one."""
        self._thread.shutdown(wait=True, cancel_futures=True)
