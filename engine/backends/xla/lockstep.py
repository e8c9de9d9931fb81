"""Lockstep: where replicas that are threads of one process wait for one another.

They compile one after another, the first first: XLA on the CPU lets the threads of a collective
meet by the executable that they run. Two that compile the same graph at once run an executable
each, never meet, and the process is aborted. So the first compiles and starts, and the others, who
find what it has compiled, start after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from phaseloop.engine import outcomes
from phaseloop.engine.errors import PeerError


class Lockstep:
    """What the replicas of one training wait at.

    Args:
        count: how many there are.
        longest: seconds that a wait may take while one of them is at its work, which may compile.
    """

    def __init__(self, count: int, longest: float) -> None:
        self._count = count
        self._longest = longest
        self._changed = threading.Condition()
        self._arrived = self._turn = self._working = 0
        self._worked = 0.0
        self._posts: dict[tuple[int, int], Any] = {}
        self._taken: dict[int, int] = {}
        self._cause: tuple[int, BaseException] | None = None
        self._over = False

    def run(self, first: bool, work: Callable[[], None], seconds: float) -> None:
        """Every replica does its work: the first alone, and the others when it has.

        Args:
            first: this is the first.
            seconds: that each wait may take while nobody is at work.

        Raises:
            PeerError: another replica has failed.
            RuntimeError: one did not come in time.
        """
        self._meet(seconds)
        if first:
            self._work(work)
        self._meet(seconds)
        if not first:
            self._work(work)

    def post(self, number: int, rank: int, value: Any) -> None:
        """Leave a value for all, who take it by its number; each number is used once.

        Raises:
            PeerError: another replica has failed.
        """
        with self._changed:
            self._check()
            self._posts[number, rank] = value
            self._changed.notify_all()

    def take(self, number: int, ranks: list[int], seconds: float) -> list[Any]:
        """What these have left under a number, by rank; every replica takes once, be it nothing.

        Raises:
            PeerError: another replica has failed.
            RuntimeError: one has left nothing in time.
        """
        keys = [(number, rank) for rank in ranks]
        with self._changed:
            self._wait(lambda: all(key in self._posts for key in keys), seconds)
            found = [self._posts[key] for key in keys]
            self._taken[number] = self._taken.get(number, 0) + 1
            if self._taken[number] == self._count:
                del self._taken[number]
                for rank in range(self._count):
                    self._posts.pop((number, rank), None)
            return found

    def abort(self, rank: int = 0, error: BaseException | None = None) -> None:
        """Whoever waits, or will, ends with an error.

        Args:
            rank, error: who has failed, and of what; the first that is no other's is kept.
        """
        with self._changed:
            self._over = True
            if self._cause is None and error is not None and not outcomes.is_lost(error):
                self._cause = rank, error
            self._changed.notify_all()

    def gone(self) -> PeerError | None:
        """What a replica fails of that another's failure has reached; None: none has failed."""
        if not self._over:
            return None
        if self._cause is None:
            return PeerError("another replica has failed")
        rank, error = self._cause
        found = PeerError(f"rank {rank}: {type(error).__name__}: {error}")
        found.__cause__ = error
        return found

    def _work(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._working += 1
        try:
            work()
        finally:
            with self._changed:
                self._working -= 1
                self._worked = time.monotonic()
                self._changed.notify_all()

    def _meet(self, seconds: float) -> None:
        with self._changed:
            self._check()
            turn = self._turn
            self._arrived += 1
            if self._arrived == self._count:
                self._arrived, self._turn = 0, turn + 1
                self._changed.notify_all()
            self._wait(lambda: self._turn != turn, seconds)

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Until it is done; time in which another works counts for the longest wait alone."""
        began = time.monotonic()
        while not done():
            self._check()
            until = max(began, self._worked) + seconds
            if self._working:
                until = max(until, began + self._longest)
            if (left := until - time.monotonic()) <= 0:
                raise RuntimeError(f"timed out after {seconds:g} s: a replica did not come")
            self._changed.wait(left)

    def _check(self) -> None:
        if (gone := self.gone()) is not None:
            raise gone


_trainings: dict[int, Lockstep] = {}
_one_at_a_time = threading.Lock()


def of_training(number: int, count: int, longest: float) -> Lockstep:
    """The same for all replicas of this process's training of that number."""
    with _one_at_a_time:
        return _trainings.setdefault(number, Lockstep(count, longest))


def let_go(number: int) -> None:
    """The training is over."""
    with _one_at_a_time:
        _trainings.pop(number, None)


def abort_all() -> None:
    """The process is about to end: nobody waits any more."""
    with _one_at_a_time:
        for one in _trainings.values():
            one.abort()
