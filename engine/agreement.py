"""Agreement: what several processes decide together, so that all act at the same border.

While a window is worked on, a few integers of every process are added up on the host: who was sent
a signal, who asks for a stop, how much of a stream is left, what time it is on the primary. The sum
is there before the window closes, so nobody waits for it, and the device is never asked.

So what a process asks for after window k is acted on by all after window k+1. At the borders of
phases the sum is waited for, and what was asked for there holds at once, as with one process. An
update that one leaves out all leave out: that is waited for too, where a hook may do so.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from phaseloop.engine.errors import PhaseloopError
from phaseloop.engine.marks import are_same, mark, with_square
from phaseloop.engine.patience import Patience

if TYPE_CHECKING:
    from phaseloop.engine.backends.host import Waited
    from phaseloop.engine.data.plan import Window
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPS, _ENDS, _CLOCK, _MORE, _NEXT, _PLACE, _PLACE_SQUARED = range(
    len(_SIGNALS), len(_SIGNALS) + 7
)
_FIELDS = len(_SIGNALS) + 7
_MOMENT = 0.5  # seconds, far below any time limit

_ALWAYS = (
    "of several processes a step gives a weight always, or never: the number of samples is the "
    "weight where it would give none"
)


class Agreement:
    """What the processes of a run have agreed on.

    Args:
        task: with a backend of several processes.

    Attributes:
        stop: all stop at this border.
        clock: seconds on the primary's clock, the same on all processes.
        last: no process may go on in this pass: of the training once one of them has nothing
            left, of a test once all of them have.
        left: samples that the processes have ready for the window after this one.
        patience: how long they wait for one another.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._backend = task.backend
        self.patience = Patience(task.backend)
        self.stop = False
        self.clock = time.monotonic()
        self.last = False
        self.left = 0
        self._told = torch.zeros(_FIELDS, dtype=torch.int64)
        self._work: Waited | None = None
        # By stage and optimizers: whether their losses have weights.
        self._weighs: dict[tuple[Any, ...], bool] = {}

    # --- once a window ---

    def begin(self, window: Window) -> None:
        """A window begins on this process: tell the others, and go on."""
        if self._work is not None:
            return  # it begins anew, and they have been told
        self._tell(window)
        self._work = self._backend.sum_on_host(self._told)

    def close(self, window: Window) -> bool:
        """The window is over: act on what the others have told; whether the pass ends with it.

        Raises:
            PhaseloopError: the processes are not at the same place.
        """
        assert self._work is not None
        self._work.wait()
        self._work = None
        self._heed()
        if window.ahead is None:  # the plan knows
            return window.last
        return self.last

    # --- at the borders of phases ---

    def meet(self) -> None:
        """The same, at once: wait for all others to come here."""
        self._tell(None)
        self._backend.total_on_host(self._told)
        self._heed()

    # --- anywhere, where all come to ---

    def total(self, number: int) -> int:
        """A number of every process, added up; all wait for it."""
        return self.totals([number])[0]

    def totals(self, numbers: list[int]) -> list[int]:
        """The same for several at once."""
        told = self._backend.total_on_host(torch.tensor(numbers, dtype=torch.int64))
        return [int(number) for number in told.tolist()]

    def wait_for_primary(self, ended: Callable[[float], bool]) -> None:
        """Wait for something that only the primary has, such as a save, however long it takes.

        No process waits for another longer than a moment, so no time limit is reached.

        Args:
            ended: called on the primary with the seconds that it may wait; whether it has ended.
        """
        while not self.total(self._backend.primary and ended(_MOMENT)):
            pass

    def check_weights(self, given: bool) -> None:
        """Before gradients are averaged: weights are added up over all processes, or over none.

        Asked at the first update; after that a process knows what all others do.

        Args:
            given: this process called ``backward`` with a weight.

        Raises:
            PhaseloopError: some give a weight and others none, or now and then only.
            ConfigError: all give one, which the backend cannot have.
        """
        task = self._task
        key = (task.progress.stage, *task.stepping)
        known = self._weighs.get(key)
        if known is None:
            count, size = self.total(given), self._backend.world_size
            if count not in (0, size):
                raise PhaseloopError(
                    f"{count} of {size} processes called backward() with a weight at update "
                    f"{task.progress.updates + 1}; {_ALWAYS}"
                )
            if given:
                self._backend.check_weights()
            self._weighs[key] = given
        elif known is not given:
            first, now = ("with", "without") if known else ("without", "with")
            raise PhaseloopError(
                f"rank {self._backend.rank} called backward() {first} a weight before, and at "
                f"update {task.progress.updates + 1} {now} one; {_ALWAYS}"
            )

    def skips(self) -> None:
        """After ``on_gradients``: what a hook leaves out, or rolls back, on one process, all do."""
        task, size = self._task, self._backend.world_size
        back, left_out = task.roll_back_asked, task.left_out
        asked = [task.skip_reason is not None, back is not None]
        totals = self.totals([*asked, *(name in left_out for name in task.optimizers)])
        if all(count in (0, size) for count in totals):
            return
        told = self._backend.all_gather_object((task.skip_reason, back, left_out))
        for rank, (reason, back, left_out) in reversed([*enumerate(told)]):
            if reason is not None:  # that of the first who has one
                task.skip_reason = f"rank {rank}: {reason}"
            if back is not None:
                task.roll_back_asked = (f"rank {rank}: {back[0]}", back[1])
            for name in left_out.keys() - task.left_out.keys():
                task.skip_update(f"rank {rank}: {left_out[name]}", name)

    # --- what is told ---

    def _tell(self, window: Window | None) -> None:
        task, told = self._task, [0] * _FIELDS
        if (received := task.signals.received) in _SIGNALS:
            told[_SIGNALS.index(signal.Signals(received))] = 1
        told[_STOPS] = bool(task.stop_reason)
        told[_ENDS] = window is not None and task.phase.name in task.asked_end
        if self._backend.primary:
            told[_CLOCK] = int(time.monotonic() * 1e6)
        if window is not None and window.ahead is not None:
            told[_MORE], told[_NEXT] = window.ahead > 0, window.ahead
        told[_PLACE], told[_PLACE_SQUARED] = with_square(mark(repr(self._place())))
        self._told = torch.tensor(told, dtype=torch.int64)

    def _place(self) -> tuple[Any, ...]:
        """Where this process is; the others have to be there too."""
        task, progress = self._task, self._task.progress
        return (task.phase.name, progress.epoch, task.phase.position, progress.updates,
                progress.steps, progress.saves, progress.roll_backs)  # fmt: skip

    def _heed(self) -> None:
        told = self._told.tolist()
        size = self._backend.world_size
        if not are_same(told[_PLACE], told[_PLACE_SQUARED], size):
            raise PhaseloopError(_apart(self._backend.all_gather_object(self._place())))
        self.clock = told[_CLOCK] / 1e6
        self.left = told[_NEXT]
        self.last = told[_MORE] < size if self._task.train else not told[_MORE]
        received = [number for number, count in zip(_SIGNALS, told, strict=False) if count]
        if told[_ENDS]:
            self._end()
        if received or told[_STOPS]:
            self._stop(received)

    def _end(self) -> None:
        """The phase ends here on every process."""
        task = self._task
        reasons = self._backend.all_gather_object(task.asked_end.pop(task.phase.name, ""))
        task.end_here(next(reason for reason in reasons if reason))

    def _stop(self, received: list[signal.Signals]) -> None:
        """All stop here, and every process knows why."""
        task = self._task
        self.stop = True
        if received:
            task.signals.received = received[-1]
        told = self._backend.all_gather_object((task.stop_reason, task.stop_saved))
        named = received[-1].name if received else ""
        task.stop_reason = next((reason for reason, _ in told if reason), named)
        task.stop_here(any(saved for _, saved in told))


def _apart(places: list[tuple[Any, ...]]) -> str:
    names = ("phase", "epoch", "batch", "updates", "steps", "saves", "roll-backs")
    said = "; ".join(
        f"rank {rank}: " + ", ".join(f"{n} {v}" for n, v in zip(names, place, strict=True))
        for rank, place in enumerate(places)
    )
    return (
        f"the processes have come apart: a step or a hook has done on one what it has not done on "
        f"the others ({said})"
    )
