"""A side in a process of its own: it loads there, and runs once whenever it is its turn.

So the sides share nothing but the machine: no OpenMP runtime, no allocator, no thread that still spins when the next
one begins. What loads is seen to load, memory is that of one side, and a side that crashes is a sentence. Seconds are
taken around the call in its own process; while it runs, the others wait for a message and use no CPU.

A side is a context manager `side(request)`, named as `module:name`. When it is entered it imports libraries and reads
inputs; what it yields loads the side and returns what it can do: functions without arguments, by name.
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

from harness.processes.threads import configure_threads
from perf.measuring import Side, in_turns, turn_seconds
from perf.memory import Memory, Meter

Calls = Mapping[str, Callable[[], Any]]
"""What a side can do, by name."""
Load = Callable[[], Calls]
"""Loads a side."""

LIMIT_SECONDS = 1200.0
"""How long a side may take for one answer: compiling a backbone of 450 million parameters is the longest."""
LEAST_ROUNDS, MOST_ROUNDS = 6, 120
"""How many rounds there are: at least as many as a ratio's interval takes, at most somewhat above what a p99 needs."""
_MESSAGE = 300
"""Characters of an error that are kept."""


class SeatError(RuntimeError):
    """Why a side could not be loaded or run, in one sentence."""


class Seat:
    """One side in its process.

    Attributes:
        load_seconds: How long loading took, libraries apart.
        fastest: Seconds of the fastest call so far, by name.
    """

    def __init__(self, side: str, request: Any, *, limit: float = LIMIT_SECONDS) -> None:
        """Starts the process, and waits until the side is loaded.

        Args:
            side: Where the context manager is, as `module:name`.
            request: What it is given; picklable.
            limit: Seconds after which there is no answer.

        Raises:
            SeatError: It could not be loaded.
        """
        context = multiprocessing.get_context("spawn")  # torch and TVM do not survive a fork
        self._connection, other = context.Pipe()
        # Not a daemon: compilers start processes of their own. It ends with the connection.
        self._process = context.Process(target=serve, args=(other, side, request), name=side)
        self._process.start()
        other.close()
        self._limit = limit
        self.fastest: dict[str, float] = {}
        self.load_seconds: float = self._answer()

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def first(self, name: str) -> tuple[float, Any]:
        """Seconds and result of a call that nothing was done for."""
        seconds, result, self.fastest[name] = self._ask("first", name)
        return seconds, result

    def turn(self, name: str) -> float:
        """Seconds of one call, with all threads awake."""
        seconds, self.fastest[name] = self._ask("turn", name)
        return float(seconds)

    def wake(self, name: str) -> None:
        """Calls it until all threads run."""
        self.fastest[name] = self._ask("wake", name)

    def prepare(self, name: str) -> float:
        """Seconds of a call that belongs to loading, and is no run."""
        return float(self._ask("prepare", name))

    def result(self, name: str) -> Any:
        """What a call returns that is not measured."""
        return self._ask("result", name)

    def memory(self) -> Memory | None:
        """What loading and all calls so far took; None where the system does not tell."""
        found: Memory | None = self._ask("memory", "")
        return found

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, what: str, name: str) -> Any:
        try:
            self._connection.send((what, name))
        except OSError:
            raise self._dead() from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._connection.poll(self._limit):
                self._process.kill()
                self.close()
                raise SeatError(f"no answer within {self._limit:g} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._dead() from None
        if isinstance(answer, SeatError):
            self.close()
            raise answer
        return answer

    def _dead(self) -> SeatError:
        self._process.join()
        code = self._process.exitcode or 0
        self.close()
        names = {-number.value: number.name for number in signal.Signals}
        return SeatError(f"its process died of {names[code]}" if code in names else f"its process ended with {code}")


def serve(connection: Connection, side: str, request: Any) -> None:
    """The process: loads, tells so, and does what it is asked to until the other end is closed."""
    configure_threads()  # before libraries read the environment
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
            _obey(connection, calls, meter)
    except (EOFError, ConnectionError):  # nobody asks any more
        return
    except Exception as error:
        connection.send(SeatError(sentence(type(error).__name__, str(error))))


def _obey(connection: Connection, calls: Calls, meter: Meter) -> None:
    sides = {name: Side(call) for name, call in calls.items()}
    while True:
        what, name = connection.recv()
        if what == "memory":
            connection.send(meter.memory())
        elif what == "turn":
            sides[name].wake()
            seconds = sides[name].once()
            connection.send((seconds, sides[name].fastest))
        elif what == "wake":
            sides[name].wake()
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


def sentence(kind: str, message: str) -> str:
    """The name of an exception's type, and the first line of what it says that is one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{kind}: {lines[0]}"[:_MESSAGE] if lines else kind


def contest(
    benchmark: Any,
    seats: Mapping[str, Seat],
    name: str,
    *,
    budget: float,
    least: int = LEAST_ROUNDS,
    most: int = MOST_ROUNDS,
    rounds: int | None = None,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Lets all sides do the same in turns, one call a round.

    Args:
        benchmark: The fixture; what it times is whole rounds.
        seats: The sides. Each has done it once before.
        name: What they do.
        budget: Seconds that all rounds take together, about.
        least: Rounds that run in any case.
        most: Rounds that are enough.
        rounds: How many run, whatever they take; None for as many as the budget allows.

    Returns:
        The seconds of every round, by side, and why a side did not get to the end, by side.
    """
    lost: dict[str, str] = {}

    def attempt(side: str, do: Callable[[str], float | None]) -> float:
        if side not in lost:
            try:
                return do(name) or 0.0
            except SeatError as error:
                lost[side] = str(error)
        return math.nan

    for side, seat in seats.items():
        attempt(side, seat.wake)
    per_round = sum(turn_seconds(seat.fastest[name]) for side, seat in seats.items() if side not in lost)
    turns = {side: partial(attempt, side, seat.turn) for side, seat in seats.items()}
    seconds = in_turns(benchmark, turns, rounds or max(least, min(most, int(budget / per_round))))
    return {side: found for side, found in seconds.items() if side not in lost}, lost
