"""Replica: where ranks are threads of one process, which of them a thread works for.

XLA runs its replicas so on a CPU. What is a process's own elsewhere (its rank, its log, what it
leaves to its launcher) is there that of such a thread, and of all threads that it starts. Imports
no torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

_NAME = "_phaseloop_replica"

one_at_a_time = threading.RLock()
"""Held while a command line is read and a task is built: Hydra, imports, and the generators that a
model's first weights are drawn from are there once for all threads."""


@dataclass(frozen=True)
class Replica:
    """One of several threads of this process, each of which is a rank.

    Attributes:
        rank: its number, from 0.
        world_size: how many there are.
        local_rank: its number among those on this machine.
        local_world_size: how many there are on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def enter(replica: Replica) -> None:
    """From now on this thread is a rank, and so are those that it starts."""
    _let_threads_inherit()
    setattr(threading.current_thread(), _NAME, replica)


def mine() -> Replica | None:
    """The replica that this thread works for; None: ranks are processes, as they usually are."""
    return getattr(threading.current_thread(), _NAME, None)


def keep_to_mine(handler: logging.Handler) -> logging.Handler:
    """A handler that takes only what this replica logs; any other where ranks are processes."""
    replica = mine()
    if replica is not None:
        handler.addFilter(lambda record: _rank() == replica.rank)
    return handler


def _rank() -> int:
    """Of this thread; what a thread of torch's says, the primary says."""
    replica = mine()
    return 0 if replica is None else replica.rank


def _let_threads_inherit() -> None:
    start = threading.Thread.start
    if start.__module__ != __name__:
        threading.Thread.start = _inheriting(start)  # type: ignore[method-assign, assignment]


def _inheriting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def start_for_replica(thread: threading.Thread) -> None:
        if (replica := mine()) is not None:
            setattr(thread, _NAME, replica)
        start(thread)

    return start_for_replica
