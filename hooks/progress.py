"""Hook ``progress``: how far the run is, as bars in a terminal, else as sparse lines."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import NamedTuple

from phaseloop.engine import display, memory_use, plan_report
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.report import Columns, Throughput, duration, losses, rates, share, speed
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

log = logging.getLogger("phaseloop")

_BAR_SECONDS = 0.1  # least time between two drawings at log points
_MOVE_SECONDS = 0.5  # and between two steps, which only move the bar
_RECENT_SECONDS = 5.0  # the speed that a terminal shows is that of so long

_LOSS, _SPEED, _RATES, _WAIT, _MEMORY = range(5)
"""Facts, by how soon one is left out of a line that is too long: the last first."""


class _Mark(NamedTuple):
    """How far the training was when something was shown."""

    seconds: float
    samples: int
    waited: float


@register_hook("progress", default=True)
class Progress(Hook):
    """Shows the training at log points (``run.log_every``), and between them costs nothing.

    In a terminal a bar, which leaves nothing behind, and below it the facts, or in a test phase
    its own bar. Elsewhere, in a file or a pipe, plain lines whose columns stand below each other.
    The facts are the loss, the learning rates of the last update, samples per second, which part
    of the training's time is waiting for data, and memory: the device's at its peak, on the CPU
    what the process holds. Several of that are of the primary's process. The time to go is by the
    speed of this process, tests not counted.

    Args:
        seconds: least time between two plain lines.

    Raises:
        ConfigError: seconds is negative.
    """

    order = Order.LOG - 1  # the bar is gone before the console says how it ended
    only_watches = True

    def __init__(self, seconds: float = 10.0) -> None:
        if seconds < 0:
            raise ConfigError("hooks.progress.seconds", f"{seconds} is negative")
        self.seconds = seconds
        self._display: display.Display | None = None
        self._columns = Columns()
        self._facts: list[tuple[int, str]] = []
        self._shown = 0.0
        self._moved = 0.0
        self._whole = Throughput()  # since the start of this process, without its tests
        self._marks: deque[_Mark] = deque()

    def on_start(self, task: Task) -> None:
        self._facts = []
        self._columns = Columns()
        self._shown = time.monotonic()
        self._whole.start(task.progress.samples)
        self._marks = deque([self._mark(task)])

    def on_resume(self, task: Task) -> None:
        if not task.test_only:
            self._open(task)
            self._draw(task)

    def on_phase_start(self, task: Task) -> None:
        self._open(task)
        if not task.train:
            self._whole.pause()
        self._draw(task)

    def on_phase_end(self, task: Task) -> None:
        if not task.train:
            self._whole.go_on()
        if task.plan.trains:
            self._draw(task, test=False)

    def on_step(self, task: Task) -> None:
        if task.recorder.due and task.train:
            self._tell(task)
        elif self._display is not None and time.monotonic() - self._moved >= _MOVE_SECONDS:
            self._draw(task)

    def on_exception(self, task: Task, error: BaseException) -> None:
        self._close(task)

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self._close(task)

    def _tell(self, task: Task) -> None:
        """At a log point. Here the host waits for the device, as any sink does."""
        now = time.monotonic()
        least = self.seconds if self._display is None else _BAR_SECONDS
        if now - self._shown < least or not task.primary:
            return
        self._shown = now
        self._facts = self._found(task)
        self._remember(self._mark(task))
        if self._display is None:
            log.info("%s", self._line(task))
        else:
            self._draw(task)

    def _line(self, task: Task) -> str:
        updates = _total(task)
        done = str(task.progress.updates)
        of = f"{done:>{len(str(updates))}}/{updates}" if updates else done
        texts = [plan_report.epoch(task), f"update {of}", *(text for _, text in self._facts)]
        if to_go := self._to_go(task):
            texts.append(to_go)
        return self._columns.line(texts)

    def _found(self, task: Task) -> list[tuple[int, str]]:
        facts = [(_LOSS, text) for text in losses(task.recorder.row())]
        facts += [(_RATES, text) for text in rates(task.optimizers)]
        mark, since = self._mark(task), self._marks[0]
        seconds = mark.seconds - since.seconds
        if mark.samples > since.samples and seconds > 0:
            facts.append((_SPEED, f"{speed((mark.samples - since.samples) / seconds):>16}"))
            facts.append((_WAIT, f"data wait {share((mark.waited - since.waited) / seconds)}"))
        facts.append((_MEMORY, memory_use.described(task.backend)))
        return facts

    def _mark(self, task: Task) -> _Mark:
        return _Mark(self._whole.seconds, task.progress.samples, task.waited)

    def _remember(self, mark: _Mark) -> None:
        """What is shown next is measured from here, in a terminal from some seconds before."""
        self._marks.append(mark)
        span = 0.0 if self._display is None else _RECENT_SECONDS
        while len(self._marks) > 1 and mark.seconds - self._marks[1].seconds >= span:
            self._marks.popleft()

    def _to_go(self, task: Task) -> str:
        """``3 min 20 s to go``, or nothing where nobody knows."""
        found = []
        rate = self._whole.rate(task.progress.samples)
        if rate is not None and _total(task):
            samples = sum(_samples(task, number) for number in range(len(task.stages.given)))
            found += [samples / rate] if samples else []
        left = task.plan.seconds_left(task.progress)
        if left is not None and task.progress.stage + 1 == len(task.stages.given):
            found.append(left)
        return f"{duration(min(found))} to go" if found else ""

    def _open(self, task: Task) -> None:
        """Begin to draw, once, if it is to be; the console's header is above it by now."""
        if self._display is not None or not task.primary or task.over:
            return
        if display.is_possible():
            self._display = display.Display()

    def _draw(self, task: Task, test: bool = True) -> None:
        """Draw how far everything is.

        Args:
            test: the phase at hand, if it is a test phase, is going on.
        """
        if self._display is None:
            return
        self._moved = time.monotonic()
        bars = []
        if task.plan.trains:
            total = _total(task) or None
            label = plan_report.epoch(task)
            bars.append(display.Bar(label, task.progress.updates, total, "", self._to_go(task)))
        if test and not task.train:
            phase = task.phase
            # Of a stream nobody knows them before its end.
            batches = None if math.isinf(phase.windows) else int(phase.windows)
            bars.append(display.Bar(phase.name, phase.position, batches, "batches"))
        # Always as many lines in one run, so that nothing jumps.
        facts = self._facts or [(_LOSS, " ")]
        self._display.show(bars, facts if len(bars) == 1 and task.plan.trains else ())
        task.signals.lines_below = self._display.lines

    def _close(self, task: Task) -> None:
        if self._display is not None:
            task.signals.lines_below = 0
            self._display.close()
            self._display = None


def _total(task: Task) -> int:
    """Updates of the whole run; 0 where nobody knows how many a stage at hand or ahead makes."""
    ahead = [task.plan, *task.stages.plans()[task.progress.stage + 1 :]]
    if any(plan.endless for plan in ahead):
        return 0
    return task.plan.origin.updates + sum(plan.updates for plan in ahead)


def _samples(task: Task, number: int) -> float:
    """Samples that are still to be gone through in one stage."""
    loader, here = task.stages.loaders[number], task.progress.stage
    if loader is None or number < here:
        return 0.0
    plan = task.stages.plans()[number] if number > here else task.plan
    if loader.samples is None or not plan.known:
        made = plan.updates_done(task.progress) if number == here else 0
        return float((plan.updates - made) * loader.plan.batch_size)
    done = plan.epochs_after(task.progress.updates) if number == here else 0.0
    return (plan.epochs - done) * loader.samples
