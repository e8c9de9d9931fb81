"""Following a replay: every update is measured and compared with the run's log."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.checkpoint import contents, store
from phaseloop.engine.checkpoint.compare import forbidden_changes
from phaseloop.engine.errors import CheckpointError, ConfigError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.recorder import POSITION
from phaseloop.engine.rows import is_loss
from phaseloop.engine.run_folder import RunFolder
from phaseloop.engine.task import Task
from phaseloop.tools.replaying.found import Line
from phaseloop.tools.replaying.measure import Clock, Tap, bits, log_rows, losses, rates

REPLAYED = "replayed"

log = logging.getLogger("phaseloop")


class Step:
    """A run's step with something before it and after it; its state is the step's own."""

    def __init__(self, step: Any, follower: Follower) -> None:
        self.step = step
        self._follower = follower

    def __call__(self, task: Task) -> None:
        self._follower.call(self.step, task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


class Follower(Hook):
    """Sees every update of a replay, last of all hooks, and ends it after the last that is asked.

    Args:
        first: the update that is looked at; before it, a snapshot is made in ``scratch``.
        last: the last update.
        folder: of the run, whose log is compared; None: none is.
        roll_backs: how many of those that the run made are made here too; None: all.
        scratch: a folder of its own; None: no snapshot.

    Attributes:
        lines: from the first update that is looked at on.
        bits: checksums of loss and parameters after update ``first``.
        orders: after an update, the number of the roll-back whose order of the data comes next.
        rolled_back: what is said of the run's roll-backs.
        snapshot: of the moment before update ``first``.
        bad: the first update, of all, that was not finite.
        seconds: of update ``first``, by part.
    """

    order = Order.CHECKPOINT
    only_watches = True
    saves = True  # a snapshot

    def __init__(
        self,
        first: int,
        last: int,
        folder: Path | None = None,
        scratch: str | None = None,
        roll_backs: int | None = None,
    ) -> None:
        self.first = first
        self.last = last
        self.clock = Clock()
        self.tap = Tap(1)
        self.start: store.Saved | None = None
        self.lines: list[Line] = []
        self.logged = 0
        self.differs = ""
        self.bits: dict[str, str] = {}
        self.snapshot: store.Saved | None = None
        self.bad: int | None = None
        self.seconds: dict[str, float] = {}
        self.cold = False
        self.begun = False
        self.reached = 0
        self.orders: dict[int, int] = {}
        self.rolled_back: list[str] = []
        self._roll_backs = roll_backs
        self._folder = folder
        self._rows: dict[int, dict[str, Any]] = {}
        self._scratch = scratch
        self._norm: Tensor | None = None
        self._updates = 0

    def prepare(self, task: Task, hooks: Mapping[str, Hook]) -> None:
        """Read the run's log, and stand around the step of every stage."""
        if self._folder is not None:
            self._read_log(log_rows(self._folder, hooks))
        stages = task.stages
        stages.steps = [(Step(step, self), facts) for step, facts in stages.steps]
        task.train_step = stages.steps[0][0]

    def _read_log(self, rows: list[dict[str, Any]]) -> None:
        begin = 0 if self.start is None else self.start.position[0]
        self._rows = losses(rows)
        for row in rows:
            if row.get("event") != "roll_back" or not begin <= row["to"] < self.last:
                continue
            number, to = row["number"], row["to"]
            self.rolled_back.append(
                f"from update {row['update']} to {to}, number {number}; what was before it: "
                f"roll_backs={number - 1}"
            )
            if self._roll_backs is None or number <= self._roll_backs:
                self.orders[to] = number
            else:  # what the log has after it comes from another order
                self._rows = {k: kept for k, kept in self._rows.items() if k <= to}

    def _change_order(self, task: Task) -> None:
        """Where the run went on from a checkpoint in another order, so does the replay."""
        number = self.orders.get(task.progress.updates, 0)
        if number > task.progress.roll_backs:
            task.progress.roll_backs = number
            task.drop_batches()

    def call(self, step: Any, task: Task) -> None:
        """Make a step."""
        if task.train:
            self.clock.mark("data")
        step(task)

    def on_start(self, task: Task) -> None:
        self.begun = True
        self.reached = task.progress.updates
        self.clock.exact = self.reached >= self.first - 1
        self._change_order(task)
        if self.start is not None:
            saved = store.load(self.start, contents.STATE)
            changes = forbidden_changes(saved["identity"], task.identity)
            if changes:
                raise ConfigError(
                    "run", f"{self.start.path} is of another training: {'; '.join(changes)}"
                )
        planned = [plan.updates for plan in task.stages.plans()]
        if all(planned) and self.last > sum(planned):
            key = "update" if self.last == self.first else "until"
            raise no_such_update(self.last, f"the run is planned for {sum(planned)}", key)

    def on_gradients(self, task: Task) -> None:
        if task.progress.updates >= self.first - 1:
            norms = [p.grad.double().norm() for p in task.trainable if p.grad is not None]
            if norms:
                norm = torch.stack(norms).norm()
                self._norm = norm if self._norm is None else torch.hypot(self._norm, norm)

    def on_step(self, task: Task) -> None:
        if not task.train:
            return
        self.clock.mark("rest")
        if task.updated:
            self._updated(task)
        if task.accumulator.closed:
            self._norm, self.tap.measured = None, []
            self.clock.reset()

    def _updated(self, task: Task) -> None:
        update = self.reached = task.progress.updates
        self._updates += 1
        self._compare(update)
        line = self.line(task)
        if not line.finite and self.bad is None:
            self.bad = update
        if update >= self.first:
            self.lines.append(line)
        if update == self.first:
            self.bits = bits(task)
            self.seconds = {**self.clock.parts, "together": line.seconds}
            self.cold = self._updates == 1
        self._change_order(task)
        if update == self.first - 1:
            self.clock.exact = True
            if self._scratch is not None:
                try:
                    self.snapshot = snapshot(task, Path(self._scratch))
                except CheckpointError as error:  # then it has to come here once more
                    log.warning("%s", error)
        if update >= self.last:
            task.stop_reason = REPLAYED

    def _compare(self, update: int) -> None:
        """A row of the log, bit for bit."""
        row = self._rows.get(update)
        if not self.tap.due or row is None or self.differs:
            return
        self.logged += 1
        for name, now in self.tap.row().items():
            plain = str(now) if isinstance(now, float) and not math.isfinite(now) else now
            if name not in POSITION and name in row and row[name] != plain:
                self.differs = f"at update {update} the log has {name} {row[name]}, here {plain}"
                return

    def line(self, task: Task) -> Line:
        """What the window at hand came to. Here the host waits for the device."""
        measured = self.tap.means()
        loss = measured.get("loss")
        if loss is None and task.loss is not None:
            loss = float(task.loss)
        numbers = [value for name, value in measured.items() if is_loss(name)]
        parameters = [p.detach() for p in task.bare_model.parameters()]
        finite = all(map(math.isfinite, [*numbers, loss or 0.0])) and all(
            bool(torch.isfinite(p).all()) for p in parameters
        )
        return Line(
            update=task.progress.updates,
            epoch=task.progress.epoch,
            loss=loss,
            measured=measured,
            rates=rates(task),
            gradient_norm=float("nan") if self._norm is None else float(self._norm),
            finite=finite,
            seconds=sum(self.clock.parts.values()),
        )


def snapshot(task: Task, folder: Path) -> store.Saved:
    """A checkpoint of the task as it stands, in a folder that has nothing to do with the run."""
    checks, saves = task.before_save, task.progress.saves
    task.before_save, task.folder = [], RunFolder(folder)  # also of what is not finite
    try:
        return contents.save(task)
    finally:
        task.before_save, task.folder, task.progress.saves = checks, None, saves


def no_such_update(update: int, why: str, key: str) -> ConfigError:
    """An update that is asked for by ``key`` is not in the run."""
    return ConfigError(key, f"there is no update {update}: {why}")
