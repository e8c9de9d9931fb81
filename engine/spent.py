"""Spent: where the time of a run has gone, by part, over all its interruptions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

TRAINING, TESTING, SAVING, WAITING, REST = PARTS = (
    "training",
    "testing",
    "saving",
    "waiting",
    "rest",
)
"""Waiting for the data is a part of training; of the others each second is in one."""


class Spent:
    """Seconds by part.

    Made before a run starts. What an interrupted process has done after its last checkpoint is
    lost, with the time that it took.

    Attributes:
        seconds: by part.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._part = REST
        self._since = time.monotonic()
        self._stalled = self._waited = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(seconds for part, seconds in self.seconds.items() if part != WAITING)

    def begin(self, part: str, task: Task) -> None:
        """What follows is of this part, but for the saves in it."""
        now, stalled, waited = time.monotonic(), task.writer.stalled, task.waited
        saving = stalled - self._stalled
        self.seconds[self._part] += now - self._since - saving
        self.seconds[SAVING] += saving
        self.seconds[WAITING] += waited - self._waited
        self._part, self._since, self._stalled, self._waited = part, now, stalled, waited

    def bring_up(self, task: Task) -> None:
        """Have ``seconds`` hold all up to now."""
        self.begin(self._part, task)

    def add(self, seconds: Mapping[str, float]) -> None:
        """What the processes before have spent."""
        for part in PARTS:
            self.seconds[part] += seconds.get(part, 0.0)
