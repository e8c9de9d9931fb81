"""Threads: what replicas that are threads of one process say to one another, within it.

No socket is needed, whose end would be one more error; and gloo of torch 2.9 prints a line for each
that it has connected.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any

from torch import Tensor

from phaseloop.engine.backends.host import Host, Waited
from phaseloop.engine.backends.xla.lockstep import Lockstep


class Threads(Host):
    """Of one replica. All make the same calls in the same order, so that their numbers agree.

    Args:
        lockstep: that all of them have.
        rank, world_size: of this replica.
        seconds: that each of the calls may take.

    Raises:
        PeerError: another replica has failed; the calls too.
        RuntimeError: one did not come in time; the calls.
    """

    alone = False

    def __init__(self, lockstep: Lockstep, rank: int, world_size: int, seconds: float) -> None:
        self._lockstep = lockstep
        self._rank = rank
        self._all = list(range(world_size))
        self._seconds = seconds
        self._numbers = itertools.count()

    def limit(self, seconds: float) -> None:
        self._seconds = seconds

    def sum(self, tensor: Tensor) -> Waited:
        return _Sum(self, tensor)

    def barrier(self) -> None:
        self.take(self.post(None), self._all)

    def all_gather(self, value: Any) -> list[Any]:
        # Pickled: each gets an object of its own.
        found = self.take(self.post(pickle.dumps(value)), self._all)
        return [pickle.loads(one) for one in found]

    def gather(self, value: Any) -> list[Any]:
        number = self.post(pickle.dumps(value))
        found = self.take(number, [] if self._rank else self._all)
        values: list[Any] = [pickle.loads(one) for one in found] or [None for _ in self._all]
        values[self._rank] = value
        return values

    def broadcast(self, value: Any) -> Any:
        number = self.post(None if self._rank else pickle.dumps(value))
        found = self.take(number, [0] if self._rank else [])
        return pickle.loads(found[0]) if found else value

    def post(self, value: Any) -> int:
        """Leave a value; the number that it is taken by."""
        number = next(self._numbers)
        self._lockstep.post(number, self._rank, value)
        return number

    def take(self, number: int, ranks: list[int]) -> list[Any]:
        """What these have left under the number."""
        return self._lockstep.take(number, ranks, self._seconds)

    def total(self, number: int) -> Any:
        """The sum of what all have left, in the order of ranks: the same bits for each."""
        first, *others = self.take(number, self._all)
        return sum(others, first)


class _Sum:
    """A sum that is under way: what this replica adds is known to all."""

    def __init__(self, threads: Threads, tensor: Tensor) -> None:
        self._threads = threads
        self._tensor = tensor
        self._number = threads.post(tensor.clone())

    def wait(self) -> Any:
        self._tensor.copy_(self._threads.total(self._number))
