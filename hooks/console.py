"""Hook ``console``: says what is trained, a line per test or epoch, and how the run ended."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from phaseloop.engine import plan_report
from phaseloop.engine.closing_report import Account, ended, nothing_done
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.header_report import header
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.registry import register_hook
from phaseloop.engine.report import Rows, Throughput, aligned, number, rates, speed
from phaseloop.engine.spent import REST, TESTING, TRAINING
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

log = logging.getLogger("phaseloop")


@register_hook("console", default=True)
class Console(Hook):
    """Speaks on the primary, through the logger ``phaseloop`` at INFO: so into ``log.txt`` too.

    A line comes after each test phase, and after a train phase that no test follows. In a terminal
    that is too narrow for it, it goes without learning rates and speed, or is folded. A checkpoint
    has what the closing table says of the whole run: where its time went, and when each metric was
    best.
    """

    order = Order.LOG
    only_watches = True

    def __init__(self) -> None:
        self._speed = Throughput()  # of the epoch at hand, without its tests
        self._account = Account()
        self._task: Task | None = None
        self._first_step = self._first_sample = self._before = 0
        self._phases = 0
        self._begun = False

    def on_start(self, task: Task) -> None:
        self._task = task
        self._account = Account(whole=not task.resumed)
        self._account.spent.begin(REST, task)
        self._first_step, self._first_sample = task.progress.steps, task.progress.samples
        self._before = self._phases = 0
        self._begun = False
        self._speed.start(task.progress.samples)
        if task.primary:
            _say(header(task))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        account = self._account
        account.best_at = {name: (u, v) for name, (u, v) in state["best_at"].items()}
        if self._begun:  # a roll-back: its time is spent, and the run was not resumed
            return
        account.spent.add(state["seconds"])
        account.resumes, account.whole = state["resumes"], state["whole"]
        self._before = state["samples"]

    def on_resume(self, task: Task) -> None:
        if self._begun:
            return
        for name, value in task.best.items():  # of a checkpoint that does not say when
            self._account.best_at.setdefault(name, (None, value))
        self._begun = True
        self._account.resumes += 1
        if task.progress.epoch_open and not task.progress.tests_due:
            self._account.spent.begin(TRAINING, task)

    def state_dict(self) -> dict[str, Any]:
        if self._task is None or not self._task.primary:
            return {}
        account = self._brought_up(self._task)
        return {
            "seconds": dict(account.spent.seconds),
            "samples": account.samples,
            "resumes": account.resumes,
            "whole": account.whole,
            "best_at": {name: list(found) for name, found in account.best_at.items()},
        }

    def on_phase_start(self, task: Task) -> None:
        self._begun = True
        self._phases += 1
        self._account.spent.begin(TRAINING if task.train else TESTING, task)
        if task.train:
            self._speed.start(task.progress.samples)
        else:
            self._speed.pause()

    def on_phase_end(self, task: Task) -> None:
        self._phases += 1
        goes_on = not task.train and task.progress.epoch_open
        self._account.spent.begin(TRAINING if goes_on else REST, task)
        if task.train:
            self._speed.pause()
        elif goes_on:
            self._speed.go_on()
        self._note_best(task)
        # The line of the test that follows tells about the training too.
        if task.primary and not (task.train and task.progress.tests_due):
            parts = list(self._line(task))
            log.info("%s", "  ".join(text for _, text in parts), extra={"parts": parts})

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self._task = None
        if not task.primary:
            return
        account = self._brought_up(task)
        idle = task.resumed and not self._phases and task.progress.steps == self._first_step
        if idle and outcome.signal is None and outcome.status != "failed":
            _say(nothing_done(task, outcome, account))
        else:
            _say(ended(task, outcome, account))

    def _brought_up(self, task: Task) -> Account:
        self._account.spent.bring_up(task)
        self._account.samples = self._before + task.progress.samples - self._first_sample
        return self._account

    def _note_best(self, task: Task) -> None:
        for name, value in task.best.items():
            if name not in self._account.best_at or self._account.best_at[name][1] != value:
                self._account.best_at[name] = (task.progress.updates, value)

    def _line(self, task: Task) -> Iterable[tuple[int, str]]:
        """Texts, each with a number: what has none but 0 stays in a terminal that is narrow."""
        progress, plan = task.progress, task.plan
        if plan.trains:
            yield 0, plan_report.epoch(task)
            yield 0, f"update {progress.updates:>{len(str(task.stages.updates))}}"
        # In mid-epoch the train metrics are those of the epoch before.
        if plan.trains and not progress.epoch_open:
            yield from ((0, text) for text in _metrics(TRAIN, task.metrics))
        if not task.train:
            yield from ((0, text) for text in _metrics(task.phase.name, task.phase.metrics))
        if plan.trains:
            yield from ((1, text) for text in rates(task.optimizers))
        rate = self._speed.rate(progress.samples)
        if rate is not None:
            yield 2, speed(rate)


def _say(rows: Rows) -> None:
    for line in aligned(rows):
        log.info("%s", line)


def _metrics(phase: str, metrics: Mapping[str, float]) -> Iterable[str]:
    """``test loss 0.0987``, ``accuracy 0.9812``: the phase is named once."""
    prefix = f"{phase}/"
    label = f"{phase} "
    for name, value in metrics.items():
        if name.startswith(prefix):
            yield f"{label}{name.removeprefix(prefix)} {number(value):>6}"
            label = ""
