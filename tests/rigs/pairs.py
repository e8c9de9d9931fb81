"""Many short trainings in one pair of processes that stay joined in between: so they are quick.

A case is a function at the top of a module, called on every process; what it returned, or the text
of its error, comes back by rank. After an error processes are no longer in step, so that a case
that has one has to be the last of its pair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from phaseloop import Hook, Outcome, Task, Trainer
from phaseloop.engine.backends import Ddp, Horovod
from phaseloop.engine.backends.host import Host
from phaseloop.engine.backends.processes import Processes
from tests.rigs import process, ranks

Case = tuple[Callable[..., Any], dict[str, Any]]

PATIENCE = 20.0
"""Seconds that a process waits for the others before it ends with an error."""


class Failed(str):
    """The text of an error that a case ended with."""


class _StaysJoined(Processes):
    """On the CPU; its processes find each other once, for all tasks after."""

    _joined: Any = None

    def setup(self) -> None:
        if self.world_size == 1:
            return
        if _StaysJoined._joined is None:
            super().setup()
            _StaysJoined._joined = self.host
        self.host = _StaysJoined._joined

    def patient(self, on: bool) -> None:
        """The time that a collective may take stays as it is."""

    def teardown(self) -> None:
        self.unwrap()
        self.host = Host()

    def _exit(self) -> None:
        """The process goes on after an error, and ends in order."""


class StaysJoined(_StaysJoined, Ddp):
    """Backend ``ddp``."""


class HorovodStaysJoined(_StaysJoined, Horovod):
    """Backend ``horovod``."""


def ddp(**options: Any) -> Processes:
    """On the CPU; see :func:`tests.rigs.ranks.ddp`."""
    options = {"timeout": PATIENCE, "start_timeout": PATIENCE, **options}
    if ranks.by_horovod():
        return HorovodStaysJoined("cpu", **ranks.without_ddps(options))
    return StaysJoined("cpu", **options)


def results(
    cases: Sequence[Case], processes: int = 2, limit: float = process.LIMIT
) -> list[list[Any]]:
    """By case, what it returned on each rank; a :class:`Failed` where it raised an error."""
    by_rank = ranks.results(_all, list(cases), processes=processes, limit=limit)
    return [list(case) for case in zip(*by_rank, strict=True)]


def train(task: Task, **hooks: Hook) -> Outcome:
    """Train with these hooks and no others."""
    return Trainer(task, hooks).train()


def rank() -> int:
    """Of this process."""
    return int(os.environ.get("RANK", "0"))


def play(cases: Sequence[Case]) -> list[Any]:
    """In this process, one after another: what each returned, or a :class:`Failed`."""
    found: list[Any] = []
    for function, options in cases:
        print(function.__name__, options, flush=True)
        try:
            found.append(function(**options))
        except Exception as error:
            found.append(Failed(f"{type(error).__name__}: {error}"))
    return found


def _all(cases: list[Case]) -> list[Any]:
    found = play(cases)
    if dist.is_initialized() and not any(isinstance(one, Failed) for one in found):
        dist.destroy_process_group()
    return found
