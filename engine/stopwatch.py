"""Stopwatch: how long each part of each phase took, the parts within it left out."""

from __future__ import annotations

import time
from collections.abc import Callable

REST = "rest"
"""What is in no part: the loop itself, and what lies between the others."""

HOOK = "hook/"
"""What the part of a hook begins with; its name follows."""


class Stopwatch:
    """A watcher of :class:`~phaseloop.engine.parts.Parts` with one clock, which is always on.

    All time since the last word of the loop goes to the innermost part that is open. So the parts
    of a phase add up to the time from when the trainer looked for it until it looks for the next.
    What a hook calls, the model say, is that hook's.

    Args:
        clock: seconds on a clock that only goes forward.

    Attributes:
        spent: seconds, by phase and part.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spent: dict[str, dict[str, float]] = {}
        self._clock = clock
        self._open: list[str] = []
        self._own: dict[str, float] = {}  # of the phase at hand
        self._last = clock()

    def enter(self, part: str) -> None:
        """A part begins."""
        self.count()
        within = self._open[-1] if self._open else ""
        self._open.append(within if within.startswith(HOOK) else part)

    def leave(self, part: str) -> None:
        """The part that began last is over."""
        self.count()
        if self._open:  # else it was open before anybody watched
            self._open.pop()

    def between(self) -> None:
        """The trainer looks for the next phase: from now on the time is that one's."""
        self.count()
        self._own = {}

    def phase(self, name: str) -> None:
        """It has found this one, or gone back into it."""
        self.count()
        own = self.spent.setdefault(name, {})
        for part, seconds in self._own.items():
            own[part] = own.get(part, 0.0) + seconds
        self._own = own

    def count(self) -> None:
        """Give the time until now to the part that is open."""
        now = self._clock()
        part = self._open[-1] if self._open else REST
        self._own[part] = self._own.get(part, 0.0) + now - self._last
        self._last = now
