"""Hook ``progress``: how far the training is, as a bar in a terminal, else as sparse lines."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

from phaseloop.engine import plan_report
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.report import Throughput, duration, learning_rates, number
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

log = logging.getLogger("phaseloop")

_BAR_SECONDS = 0.1


@register_hook("progress", default=True)
class Progress(Hook):
    """Shows the training at log points (``run.log_every``), and between them costs nothing.

    In a terminal a bar that leaves nothing behind: epoch, update, loss, samples per second and
    the time to go, tests not counted. Elsewhere, in a file or a pipe, plain lines.

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
        self._bar: RichProgress | None = None
        self._every = seconds
        self._shown = 0.0
        self._speed = Throughput()  # since it was last shown
        self._whole = Throughput()  # since the start of this process: steadier, for the time to go

    def on_start(self, task: Task) -> None:
        self._every = self.seconds
        self._shown = time.monotonic()
        self._speed.start(task.progress.samples)
        self._whole.start(task.progress.samples)

    def on_resume(self, task: Task) -> None:
        self._open(task)

    def on_phase_start(self, task: Task) -> None:
        self._open(task)
        if not task.train:
            self._speed.pause()
            self._whole.pause()
        self._describe(task, "" if task.train else task.phase.name)

    def on_phase_end(self, task: Task) -> None:
        if not task.train:
            self._speed.go_on()
            self._whole.go_on()
        self._describe(task)

    def on_step(self, task: Task) -> None:
        if task.recorder.due and task.train:
            self._show(task)

    def on_exception(self, task: Task, error: BaseException) -> None:
        self._close()

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self._close()

    def _show(self, task: Task) -> None:
        now = time.monotonic()
        if now - self._shown < self._every or not task.primary:
            return
        self._shown = now
        if self._bar is None:
            of = f"/{task.stages.updates}" if task.plan.updates else ""
            done = f"update {task.progress.updates}{of}"
            log.info("epoch %d %s %s", task.progress.epoch, done, " ".join(self._facts(task)))
        else:
            facts = self._facts(task)
            if to_go := self._to_go(task):
                facts.append(to_go)
            self._bar.update(
                self._bar.task_ids[0],
                completed=task.progress.updates,
                facts="  ".join(facts),
                refresh=True,
            )
        self._speed.start(task.progress.samples)

    def _facts(self, task: Task) -> list[str]:
        """Loss, learning rate and speed. Here the host waits for the device, as any sink does."""
        row = task.recorder.row()
        facts = [f"loss {number(row['loss'])}"] if "loss" in row else []
        if rates := learning_rates(task.optimizers):
            facts.append(rates)
        speed = self._speed.rate(task.progress.samples)
        if speed is not None:
            facts.append(f"{speed:,.0f} samples/s")
        return facts

    def _to_go(self, task: Task) -> str:
        speed = self._whole.rate(task.progress.samples)
        if speed is None or not task.plan.updates:
            return ""
        samples = sum(_samples(task, number) for number in range(len(task.stages.given)))
        return f"{duration(samples / speed)} to go"

    def _open(self, task: Task) -> None:
        """Begin the bar, once, if there is to be one; the console's header is above it by now."""
        if self._bar is not None or not task.primary or not task.plan.trains or task.over:
            return
        if _in_terminal():
            self._every = _BAR_SECONDS
            self._bar = _new_bar()
            done, planned = task.progress.updates, task.stages.updates
            total = planned if task.plan.updates else None
            self._bar.add_task(plan_report.epoch(task), completed=done, total=total, facts="")

    def _describe(self, task: Task, phase: str = "") -> None:
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                description=f"{plan_report.epoch(task)} {phase}".rstrip(),
                completed=task.progress.updates,
                refresh=True,
            )

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


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


def _in_terminal() -> bool:
    """Whether a bar may be drawn; rich is imported only where it may."""
    if sys.stdout is None or not sys.stdout.isatty():
        return False
    from rich.console import Console

    return Console().is_interactive  # not so in a terminal that cannot move its cursor


def _new_bar() -> RichProgress:
    """A bar that prints what others print above itself."""
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:,}/{task.total:,}", markup=False),
        TextColumn("{task.fields[facts]}", markup=False),
        # No thread that redraws: a worker forked while it holds the console's lock would hang.
        auto_refresh=False,
        transient=True,
    )
    bar.start()
    # rich hides the cursor; a run that is killed could never bring it back.
    bar.console.show_cursor(True)
    return bar
