"""Many short trainings in one process that XLA is started in: each start costs seconds.

A case is a function at the top of a module; what it returned, or the text of its error, comes back.
What is compiled for one case is there for the next, so cases that count give their model a width
that no other has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phaseloop import Hook, Task
from tests.rigs import process
from tests.rigs.pairs import Case, play

LIMIT = 300.0
"""Seconds for all cases of a process; many times what they take on a quiet machine."""


def results(cases: Sequence[Case]) -> list[Any]:
    """By case, what it returned; a :class:`~tests.rigs.pairs.Failed` where it raised an error."""
    found: list[Any] = process.result_within(LIMIT, play, list(cases))
    return found


def compiled() -> int:
    """Programs that were compiled in this process so far."""
    import torch_xla.core.xla_model as functions
    import torch_xla.debug.metrics as counters

    functions.wait_device_ops()
    seen = counters.metric_data("CompileTime")
    return seen[0] if seen else 0


class Compiles(Hook):
    """Counts what is compiled: within each step, and between it and the next.

    Attributes:
        counts: by phase, for each step (within, behind): also what the border behind it takes.
    """

    order = -1000  # before all others: what they have compiled at a step's end is behind it

    def __init__(self) -> None:
        self.counts: dict[str, list[list[int]]] = {}
        self._seen = 0
        self._last: list[int] | None = None

    def on_start(self, task: Task) -> None:
        self._seen = compiled()

    def on_forward(self, task: Task) -> None:
        # Nothing of the step's own is compiled before its end.
        if self._last is not None:
            self._last[1] += self._new()

    def on_step(self, task: Task) -> None:
        self._last = [self._new(), 0]
        self.counts.setdefault(task.phase.name, []).append(self._last)

    def on_loop_end(self, task: Task) -> None:
        if self._last is not None:
            self._last[1] += self._new()

    def _new(self) -> int:
        before, self._seen = self._seen, compiled()
        return self._seen - before
