"""A side of a benchmark in a process of its own: it loads there, and runs once when it is asked to.

So the sides share nothing but the machine: no OpenMP runtime, no allocator, no thread that still spins when the next
side begins. What a side loads is measured as its load, memory is that of one side, and a side that crashes is reported
in one sentence. Seconds are taken around the call in its own process; while it runs, the other processes wait for a
message and use no CPU.

A side is a context manager `side(request)`, named as `module:name`. When it is entered, it imports libraries and reads
inputs; what it yields loads the side and returns the functions that it can run: without arguments, by name.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from harness.core.processes.threads import configure_threads, thread_count
from perf.measuring import Side, expected_seconds, run_rounds
from perf.memory import Memory, Meter

Calls = Mapping[str, Callable[[], Any]]
"""The functions that a side can run, by name."""
Load = Callable[[], Calls]
"""Loads a side."""

LIMIT_SECONDS = 1200.0
"""How long a process may take for one answer: compiling a backbone of 450 million parameters takes longest."""
LEAST_ROUNDS, MOST_ROUNDS = 6, 120
"""How many rounds there are: at least as many as the interval of a ratio needs, at most a few more than a p99 needs."""
_MESSAGE = 300
"""Characters of an error that are kept."""


class BenchmarkProcessError(RuntimeError):
    """Why a side could not be loaded or run, in one sentence."""


class BenchmarkProcess:
    """The process of one side.

    Attributes:
        load_seconds: How long loading took, libraries apart.
        fastest: Seconds of the fastest call so far, by name.
    """

    def __init__(self, side: str, request: Any, *, limit: float = LIMIT_SECONDS) -> None:
        """Starts the process, and waits until the side is loaded.

        Args:
            side: Where the context manager is, as `module:name`.
            request: The argument of the context manager; picklable.
            limit: Seconds after which an answer is no longer waited for.

        Raises:
            BenchmarkProcessError: The side could not be loaded.
        """
        context = multiprocessing.get_context("spawn")  # torch and TVM do not survive a fork
        self._connection, other = context.Pipe()
        # Not a daemon: compilers start processes of their own. It ends with the connection.
        self._process = context.Process(target=serve, args=(other, side, request, thread_count()), name=side)
        self._process.start()
        other.close()
        self._limit = limit
        self.fastest: dict[str, float] = {}
        self.load_seconds: float = self._receive()

    def __enter__(self) -> BenchmarkProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def first(self, name: str, *, limit: float | None = None) -> tuple[float, Any]:
        """Returns the seconds and the result of a call that is not preceded by a warm-up.

        Args:
            name: Of the function.
            limit: Seconds after which this answer is no longer waited for; None for the process's own limit.

        Raises:
            BenchmarkProcessError: The call failed or took too long; the process has ended.
        """
        seconds, result, self.fastest[name] = self._ask("first", name, limit)
        return seconds, result

    def timed(self, name: str) -> float:
        """Returns the seconds of one call after a warm-up."""
        seconds, self.fastest[name] = self._ask("timed", name)
        return float(seconds)

    def warm_up(self, name: str) -> None:
        """Calls a function until all threads run."""
        self.fastest[name] = self._ask("warm_up", name)

    def prepare(self, name: str) -> float:
        """Returns the seconds of a call that belongs to loading, and is no run."""
        return float(self._ask("prepare", name))

    def result(self, name: str) -> Any:
        """Returns the result of a call that is not measured."""
        return self._ask("result", name)

    def memory(self) -> Memory | None:
        """Returns the memory of loading and of all calls so far; None where the system does not tell."""
        found: Memory | None = self._ask("memory", "")
        return found

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, what: str, name: str, limit: float | None = None) -> Any:
        try:
            self._connection.send((what, name))
        except OSError:
            raise self._ended() from None
        return self._receive(limit)

    def _receive(self, limit: float | None = None) -> Any:
        limit = limit or self._limit
        try:
            if not self._connection.poll(limit):
                self._process.kill()
                self.close()
                raise BenchmarkProcessError(f"no answer within {limit:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        if isinstance(answer, BenchmarkProcessError):
            self.close()
            raise answer
        return answer

    def _ended(self) -> BenchmarkProcessError:
        self._process.join()
        code = self._process.exitcode or 0
        self.close()
        names = {-number.value: number.name for number in signal.Signals}
        how = f"died of {names[code]}" if code in names else f"ended with {code}"
        return BenchmarkProcessError(f"its process {how}")


def serve(connection: Connection, side: str, request: Any, threads: int) -> None:
    """Is the process: loads the side, answers that it is loaded, and runs functions until the other end is closed."""
    configure_threads(threads)  # before libraries read the environment
    try:
        module, _, name = side.partition(":")
        factory: Callable[[Any], AbstractContextManager[Load]] = getattr(importlib.import_module(module), name)
        with factory(request) as load:
            configure_threads()  # torch is imported now
            meter = Meter()
            meter.start()
            start = time.perf_counter()
            calls = load()
            seconds = time.perf_counter() - start
            meter.note_loaded()
            connection.send(seconds)
            _answer_requests(connection, calls, meter)
    except (EOFError, ConnectionError):  # nobody asks any more
        return
    except Exception as error:
        connection.send(BenchmarkProcessError(error_sentence(type(error).__name__, str(error))))


def _answer_requests(connection: Connection, calls: Calls, meter: Meter) -> None:
    sides = {name: Side(call) for name, call in calls.items()}
    while True:
        what, name = connection.recv()
        if what == "memory":
            connection.send(meter.memory())
        elif what == "timed":
            sides[name].warm_up()
            seconds = sides[name].once()
            connection.send((seconds, sides[name].fastest))
        elif what == "warm_up":
            sides[name].warm_up()
            connection.send(sides[name].fastest)
        elif what == "prepare":
            start = time.perf_counter()
            calls[name]()
            connection.send(time.perf_counter() - start)
            meter.note_loaded()
        else:
            start = time.perf_counter()
            result = calls[name]()
            seconds = time.perf_counter() - start
            meter.pause()
            if what == "first":
                sides[name].fastest = min(sides[name].fastest, seconds)
                connection.send((seconds, result, sides[name].fastest))
            else:
                connection.send(result)
            del result
            meter.resume()


def error_sentence(kind: str, message: str) -> str:
    """Returns the name of an exception's type with the first line of its message that is not empty."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{kind}: {lines[0]}"[:_MESSAGE] if lines else kind


def run_interleaved(
    benchmark: Any,
    processes: Mapping[str, BenchmarkProcess],
    name: str,
    *,
    budget: float,
    least: int = LEAST_ROUNDS,
    most: int = MOST_ROUNDS,
    rounds: int | None = None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Runs the same function of all sides in interleaved rounds: each side makes one call a round.

    Args:
        benchmark: The fixture; it times whole rounds.
        processes: The sides. Each has run the function once before.
        name: Of the function.
        budget: Seconds that all rounds take together, about.
        least: Rounds that run in any case.
        most: Rounds that are enough.
        rounds: How many rounds run, however long they take; None for as many as the budget allows.

    Returns:
        The seconds of every round by side, and by side why it failed before the last round.
    """
    failed: dict[str, str] = {}

    def attempt(side: str, run: Callable[[str], float | None]) -> float:
        if side not in failed:
            try:
                return run(name) or 0.0
            except BenchmarkProcessError as error:
                failed[side] = str(error)
        return math.nan

    for side, process in processes.items():
        attempt(side, process.warm_up)
    per_round = sum(
        expected_seconds(process.fastest[name]) for side, process in processes.items() if side not in failed
    )
    calls = {side: partial(attempt, side, process.timed) for side, process in processes.items()}
    seconds = run_rounds(benchmark, calls, rounds or max(least, min(most, int(budget / per_round))))
    return {side: found for side, found in seconds.items() if side not in failed}, failed
