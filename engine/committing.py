"""Committing: everything that a step moves is moved here, in one place.

So nothing can ever be saved half-moved.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from torch import Tensor

from phaseloop.engine.data.batch import Batch
from phaseloop.engine.errors import PhaseloopError
from phaseloop.engine.gradients import apply_update, clear
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.progress import Progress

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


_NO_LOSS = "no micro-batch of it gave a loss"
_NOT_ASKED = "the train step never called task.next_batch()"


class Committing:
    """The part of a task that counts.

    Attributes:
        moved: names of the optimizers that this window has moved.
        skip_reason: why the update at hand is left out; None: it is not.
        may_skip: it may still be left out.
        left_out: optimizers that were left out of it, and why.
        roll_back_asked: why, and how often at most, the run is to go back to its last checkpoint.
    """

    progress: Progress
    loss: Tensor | None
    _pending: Batch | None
    _window: list[Batch]

    def __init__(self) -> None:
        self.moved: set[str] = set()
        self.skip_reason: str | None = None
        self.may_skip = False
        self._skips: list[dict[str, str]] = []
        self._last_skip = ""
        self._clock: float | None = None
        self.left_out: dict[str, str] = {}
        self.roll_back_asked: tuple[str, int] | None = None

    def commit(self: Task) -> None:  # type: ignore[misc]
        """Move everything that a step moves: the one place where progress changes."""
        if self.loss is not None:
            self.loss = self.loss.detach()
        self._pending = None
        accumulator = self.accumulator
        if not self.train:
            if accumulator.full:
                accumulator.closed = True
                last = accumulator.window.last
                if self.agreement is not None:
                    last = self.agreement.close(accumulator.window)
                self.phase.position += 1
                if last:
                    self.phase.windows = self.phase.position
                if self.shown.waiting:
                    self.shown.give(self.progress.updates, self.backend)
            return
        progress = self.progress
        self.changed = True
        takes_window = self.step_facts.takes_window
        progress.steps += accumulator.taken if takes_window else 1
        if not accumulator.full:
            return
        if not accumulator.applied or takes_window:
            self._close_window()
        if self.precision.scaler is not None:
            self.precision.scaler.update()
        if self.roll_back_asked is not None:
            self.updated = False  # whatever has moved moves back: nobody is to save it
        accumulator.closed = True
        last = accumulator.window.last
        if self.agreement is not None:
            last = self.agreement.close(accumulator.window)
        progress.windows += 1
        progress.samples += accumulator.window.samples
        self.phase.position += 1
        if last:
            self.phase.windows = progress.epoch_windows = progress.windows
        if self.updated:
            progress.updates += 1
            progress.skipped_in_a_row = 0
            progress.saves = 0
            if self.agreement is not None:
                self.agreement.patience.updated()
            for name in self.moved:
                progress.moved[name] = progress.moved.get(name, 0) + 1
            self.recorder.tick(progress.updates)
            if self.plan.keeps_time:
                self._keep_time()
        else:
            progress.skipped += 1
            progress.skipped_in_a_row += 1
        self.moved.clear()
        if self.shown.waiting:
            self._give_shown()
        # After a skip too: the border that a fraction of an epoch is at may be one.
        if self.phase.position < self.phase.windows and self.plan.test_due_in_epoch(progress):
            self.make_tests_due()
        if self._skips:
            self._record_skips()

    def _give_shown(self: Task) -> None:  # type: ignore[misc]
        """What an update has; one that is left out leaves none, as it is numbered like the next."""
        if self.updated:
            self.shown.give(self.progress.updates, self.backend)
        else:
            self.shown.drop()

    def clock(self: Task) -> float:  # type: ignore[misc]
        """Seconds on a clock that only goes forward; the same on all processes at a border."""
        return time.monotonic() if self.agreement is None else self.agreement.clock

    def _keep_time(self: Task) -> None:  # type: ignore[misc]
        """Add the wall time since the last call; the first in a process begins to count."""
        now = self.clock()
        if self._clock is not None:
            self.progress.seconds += now - self._clock
        self._clock = now

    def _close_window(self: Task) -> None:  # type: ignore[misc]
        """What the step has left open: its last micro-batch may have had no part in the window."""
        if self.step_facts.takes_window:
            for parameters in self.parameters_of.values():
                clear(parameters)
            self._window = []
            if not self.updated and not self._skips:
                empty = self.step_is_empty
                self.note_skip(_NO_LOSS if empty else "the step moved no optimizer")
        elif self.accumulator.has_gradients:
            apply_update(self)
        elif self.agreement is not None:
            raise PhaseloopError(
                f"rank {self.backend.rank} made no gradients for update "
                f"{self.progress.updates + 1}: of several processes each has to, for every "
                f"micro-batch; give a loss of weight 0"
            )
        else:
            self.note_skip(_NO_LOSS if self.accumulator.taken else _NOT_ASKED)
            clear(self.trainable)

    def note_skip(self: Task, reason: str, optimizer: str = "") -> None:  # type: ignore[misc]
        """An optimizer, or all at hand, were left out of this window's update."""
        if not optimizer and len(self.optimizers) > 1:
            optimizer = ", ".join(self.stepping)
        self._skips.append({"reason": reason, **({"optimizer": optimizer} if optimizer else {})})

    def _record_skips(self: Task) -> None:  # type: ignore[misc]
        update = self.progress.updates + (not self.updated)
        for skip in self._skips:
            name = f" for {skip['optimizer']}" if "optimizer" in skip else ""
            log.warning("update %d was skipped%s: %s", update, name, skip["reason"], extra=ALIKE)
            self.recorder.event("skip", update=update, **skip)
        self._last_skip = self._skips[-1]["reason"]
        self._skips = []
