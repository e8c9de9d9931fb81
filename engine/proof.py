"""Proof: several processes begin an update again together, until its micro-batches count as proven.

Whoever runs out of memory tells the others, who wait for that before they reduce their gradients:
at that point nothing of the update has moved anywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from phaseloop.engine.window_start import WindowStart

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


def meet_in_forward(task: Task) -> bool:
    """Going through the model is something that processes do together."""
    synced = any(isinstance(m, nn.SyncBatchNorm) for m in task.bare_model.modules())
    return task.backend.world_size > 1 and (synced or task.backend.collective_forward)


class RedoError(Exception):
    """Another process could not do its part of the window, which all begin anew."""


class Found(NamedTuple):
    """How a process stands when a window has broken off on it, or on another.

    Attributes:
        size: samples in its largest micro-batch.
        why_not: why it cannot begin the window anew; empty: it can.
        error: the first line of its error.
    """

    size: int
    why_not: str
    error: str


class Met(NamedTuple):
    """What the processes have told each other: how the first stands that broke off, and who it is.

    Its size is that of the largest micro-batch on any, and its ``why_not`` that of whoever has one.
    """

    rank: int
    found: Found


class Proof(WindowStart):
    """The start of a window on several processes, and whether all may begin it anew.

    Args:
        task: as for :class:`WindowStart`.
        updates: so many have to be made with a size, or a larger one, before it counts as proven.
    """

    def __init__(self, task: Task, updates: int) -> None:
        super().__init__(task)
        self._updates = updates
        # By stage, number of trained parameters, and size: updates made.
        self._made: dict[tuple[int, int, int], int] = {}
        self._agreed = False
        task.may_redo, task.before_reduce = True, self._agree

    @property
    def size(self) -> int:
        """Samples in the largest micro-batch of the window at hand on any process."""
        window = self._task.accumulator.window
        share = math.ceil(window.samples / self._task.backend.world_size)
        return math.ceil(share / len(window.pieces))

    def put_aside(self) -> None:
        super().put_aside()
        self._agreed = False
        if self._task.train:
            self._task.may_redo = not self._is_proven()

    def let_go(self) -> None:
        super().let_go()
        self._task.may_redo, self._task.before_reduce = False, None

    def count(self) -> None:
        """An update is made, on all processes."""
        if self._task.may_redo:
            key = self._key()
            self._made[key] = self._made.get(key, 0) + 1

    def met(self, failed: bool, found: Found) -> Met:
        """Wait for all others, here or where they reduce; what they tell.

        Args:
            failed: this process could not do its part.
            found: how it stands.
        """
        task = self._task
        rank = task.backend.rank
        if not task.may_redo or self._agreed:
            why = found.why_not or self._too_late()
            return Met(rank, found._replace(why_not=why))
        assert task.agreement is not None
        if failed:  # the others learn of it where they wait before they reduce
            task.agreement.total(1)
        told = task.backend.all_gather_object((failed, tuple(found)))
        by_rank = [(rank, Found(*found)) for rank, (failed, found) in enumerate(told) if failed]
        first, of_first = by_rank[0]
        all_ = [Found(*found) for _, found in told]
        why = next((found.why_not for found in all_ if found.why_not), "")
        return Met(first, of_first._replace(size=max(found.size for found in all_), why_not=why))

    def state(self) -> list[list[int]]:
        """What is proven, as plain Python."""
        return [[*key, made] for key, made in self._made.items()]

    def load(self, state: list[list[int]]) -> None:
        """The reverse."""
        self._made = {(stage, trained, size): made for stage, trained, size, made in state}

    def _agree(self) -> None:
        """Before gradients are reduced, on every process.

        Raises:
            RedoError: one could not do its part.
        """
        task = self._task
        if not task.may_redo or self._agreed:
            return
        assert task.agreement is not None
        if task.agreement.total(0):
            raise RedoError
        self._agreed = True

    def _too_late(self) -> str:
        if self._agreed:
            return "the update cannot be redone, since the others have gone on with it"
        return (
            f"the update cannot be redone, since after {self._updates} updates with this size "
            f"(hooks.fit_memory.prove) the others no longer wait for that"
        )

    def _key(self) -> tuple[int, int, int]:
        trained = sum(parameter.requires_grad for parameter in self._parameters)
        return (self._task.progress.stage, trained, self.size)

    def _is_proven(self) -> bool:
        """With this size, or a larger one."""
        stage, trained, size = self._key()
        return any(
            made >= self._updates
            for (its_stage, its_trained, its_size), made in self._made.items()
            if (its_stage, its_trained) == (stage, trained) and its_size >= size
        )
