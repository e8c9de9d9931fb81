"""Range test: which learning rates a training can take, tried out on a copy of it.

The rate is raised from update to update until the loss no longer falls. Source: Smith, "Cyclical
Learning Rates for Training Neural Networks", WACV 2017, section 3.3. Imports torch when it runs.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.events import Hook, Order

if TYPE_CHECKING:
    from phaseloop.engine.task import Task
    from phaseloop.engine.trainer import Outcome


@dataclass
class RangeTest:
    """What is tried.

    Args:
        start, end: the rates of the first and the last update.
        updates: how many; where the data has fewer, it is gone through several times.
        curve: ``exponential``: the rate is multiplied by the same factor each update; ``linear``.
        smoothing: beta of the moving average of the loss: avg = beta * avg + (1 - beta) * loss,
            over 1 - beta ** k at update k.
        diverge: the test ends when the smoothed loss is more than this many times its lowest value
            since the average settled. A loss below zero ends it only when it is not finite.
        dir: where ``find_lr.png`` and ``find_lr.json`` go; None: nowhere, and on the command line
            ``find_lr`` in the run's folder.
    """

    start: float = 1e-7
    end: float = 10.0
    updates: int = 100
    curve: Literal["exponential", "linear"] = "exponential"
    smoothing: float = 0.9
    diverge: float = 4.0
    dir: str | None = None

    def check(self, key: str = "find_lr") -> None:
        """Raises ConfigError for a number out of range."""
        if not 0 < self.start < math.inf:
            raise ConfigError(f"{key}.start", f"{self.start} is not a rate greater than 0")
        if not self.start < self.end < math.inf:
            raise ConfigError(f"{key}.end", f"{self.end} is not greater than start, {self.start}")
        if self.updates < 2:
            raise ConfigError(f"{key}.updates", f"{self.updates} is less than 2")
        if self.curve not in ("exponential", "linear"):
            raise ConfigError(f"{key}.curve", f"{self.curve!r} is not 'exponential' or 'linear'")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"{key}.smoothing", f"{self.smoothing} is not in [0, 1)")
        if not 1 < self.diverge < math.inf:
            raise ConfigError(f"{key}.diverge", f"{self.diverge} is not a number greater than 1")

    def rate(self, updates_done: int) -> float:
        """The rate of the next update."""
        share = updates_done / (self.updates - 1)
        if self.curve == "linear":
            return self.start + (self.end - self.start) * share
        return self.start * (self.end / self.start) ** share


@dataclass(frozen=True)
class Found:
    """What a range test has seen.

    Attributes:
        rates: of each update; for a group with a rate of its own, that times its proportion.
        losses: mean loss of each update's batch, before the update.
        smoothed: their moving average.
        suggestion: the rate where the smoothed loss falls steepest over the logarithm of the
            rate; None: it does not fall.
        ended: why it ended before its last update; empty: it did not.
        base: the rate that the optimizer had; all groups of all optimizers are scaled together.
        signal: number of the signal that broke it off, or None.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None
    ended: str
    base: float
    signal: int | None = None


def find_lr(
    task: Task | Callable[[], Task],
    settings: RangeTest | None = None,
    hooks: Mapping[str, Hook] | None = None,
) -> Found:
    """Try out learning rates.

    Nothing of the task changes, nor do this process's random generators: a copy is trained, on the
    task's training data, with its train step, accumulation, clipping and precision; without its
    folder, schedules, meters and tests.

    Args:
        task: one that was not trained, or a function that makes one, which is not copied.
        settings: what is tried.
        hooks: those of the training, by name. Copies of those that change the training take part;
            what saves, logs, stops it early or sets its rates does not.

    Raises:
        ConfigError: settings out of range; a task without training data, without an optimizer that
            has a rate, or that cannot be copied.
        PhaseloopError: the task was trained already, or its step reports no loss.
    """
    from phaseloop.engine.rng import HostGenerators
    from phaseloop.engine.trainer import Trainer
    from phaseloop.tools.range_files import write

    settings = settings or RangeTest()
    settings.check()
    host = HostGenerators()
    try:
        # A task can be called by nobody: what can is a function that makes one.
        mine = task() if callable(task) else _copy(task)
        device = mine.backend.rng_state()
        try:
            _prepare(mine, settings)
            rising = _Rising(settings)
            outcome = Trainer(mine, {**_taking_part(hooks or {}), "find_lr": rising}).train()
        finally:
            mine.backend.set_rng_state(device)
    finally:
        host.put_back()
    found = rising.found(outcome)
    if settings.dir is not None and found.signal is None:
        write(found, settings)
    return found


def _copy(task: Task) -> Task:
    """A copy that shares the data sets."""
    if task.optimizers or task.loaders:
        raise PhaseloopError("this task was trained already; make another one, or a function of it")
    from phaseloop.engine.assembly import training_data
    from phaseloop.engine.data.stream_reader import is_stream

    for key, data in training_data(task).items():
        if is_stream(data.first):
            raise ConfigError(
                f"{key}.dataset",
                "a stream can be read by one only, and the range test would read the task's: give "
                "a function that makes the task",
            )
    sets = [data for data in (task.train_data, *task.test_data.values()) if data is not None]
    shared = [thing for data in sets for thing in (data.dataset, data.collate)]
    try:
        return copy.deepcopy(task, {id(thing): thing for thing in shared if thing is not None})
    except (TypeError, RuntimeError) as error:
        raise ConfigError(
            "task", f"cannot be copied ({error}); give a function that makes it"
        ) from error


def _prepare(task: Task, settings: RangeTest) -> None:
    """The task as the range test needs it: no folder, no tests, nothing that sets the rates."""
    from phaseloop.engine.meter_set import MeterSet
    from phaseloop.engine.phases import TRAIN
    from phaseloop.engine.recorder import Recorder
    from phaseloop.engine.stages import Stage

    first = task.stages.given[0]
    data = task.stages.data(first)
    if data is None:
        raise ConfigError("data.train", "a learning-rate range test needs training data")
    task.run = dataclasses.replace(task.run, dir=None, resume="auto", log_every=1)
    task.folder = None
    task.recorder = Recorder(every=1)
    # Of several stages it is the first one's data, step and frozen parts.
    only = Stage(updates=settings.updates, test_every_epochs=None, train=data, freeze=first.freeze)
    task.stages.given, task.stages.steps = [only], task.stages.steps[:1]
    task.whole_phases, task.train_data = [only], data
    task.test_data = {}
    task.meter_sets = {TRAIN: MeterSet(TRAIN, None)}
    task.schedules = []
    task.config = {}


def _taking_part(hooks: Mapping[str, Hook]) -> dict[str, Hook]:
    """Copies of the hooks that change what an update does."""
    from phaseloop.hooks.early_stop import EarlyStop
    from phaseloop.hooks.learning_rate import LearningRate
    from phaseloop.hooks.non_finite import NonFinite

    # What is not finite ends the test well, and is no error.
    out = (EarlyStop, LearningRate, NonFinite)
    kept = {
        name: hook
        for name, hook in hooks.items()
        if not (hook.only_watches or hook.saves or isinstance(hook, out))
    }
    return copy.deepcopy(kept)


class _Rising(Hook):
    """Sets the rate of every update, and writes down its loss."""

    order = Order.LEARNING_RATE

    def __init__(self, settings: RangeTest) -> None:
        self._settings = settings
        self._groups: list[tuple[dict[str, Any], float]] = []
        self._base = 0.0
        self._rates: list[float] = []
        self._losses: list[float] = []
        self._smoothed: list[float] = []
        self._average = 0.0

    def on_start(self, task: Task) -> None:
        optimizers = list(task.optimizers.values())
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if not all("lr" in group for group in groups):
            raise ConfigError("optimizer", "a range test needs groups that all have a rate, lr")
        first = optimizers[0]
        own = [float(group["lr"]) for group in first.param_groups]
        default = float(first.defaults.get("lr", own[0]))
        # The rate that a configuration names is the default, unless no group has it.
        self._base = default if default in own else max(own)
        if not self._base > 0:
            raise ConfigError("optimizer.lr", f"{self._base} cannot be scaled; give another")
        self._groups = [(group, float(group["lr"]) / self._base) for group in groups]

    def on_gradients(self, task: Task) -> None:
        rate = self._settings.rate(task.progress.updates)
        for group, proportion in self._groups:
            if isinstance(group["lr"], float | int):
                group["lr"] = rate * proportion
            else:
                group["lr"].fill_(rate * proportion)

    def on_step(self, task: Task) -> None:
        if not task.updated:
            return
        # Here the host waits for the device, at every update.
        loss = task.recorder.row().get("loss")
        if loss is None:
            raise PhaseloopError(
                "the train step reports no loss for the range test to follow: it is for steps with "
                "one loss and one optimizer, which use task.criterion or task.measure"
            )
        rate = self._settings.rate(task.progress.updates - 1)
        if not math.isfinite(loss):
            task.request_stop(f"the loss is not finite at rate {rate:.3g}")
            return
        self._rates.append(rate)
        self._losses.append(loss)
        self._smooth(loss)
        skip = _settling(self._settings.smoothing, self._settings.updates)
        now, best = self._smoothed[-1], min(self._smoothed[skip:], default=0.0)
        if now > self._settings.diverge * best > 0:
            times = f"{self._settings.diverge:g} times its lowest value"
            task.request_stop(f"the loss is more than {times} at rate {rate:.3g}")

    def found(self, outcome: Outcome) -> Found:
        """What has been seen."""
        rates, smoothed = self._rates, self._smoothed
        suggestion = steepest(rates, smoothed, _settling(self._settings.smoothing, len(rates)))
        return Found(
            rates, self._losses, smoothed, suggestion, outcome.reason, self._base, outcome.signal
        )

    def _smooth(self, loss: float) -> None:
        beta = self._settings.smoothing
        self._average = beta * self._average + (1 - beta) * loss
        self._smoothed.append(self._average / (1 - beta ** len(self._losses)))


def _settling(beta: float, length: int) -> int:
    """Points at the start where the average is over too few losses: 1 / (1 - beta) of them."""
    return min(round(1 / (1 - beta)) if beta else 0, length // 4)


def steepest(rates: list[float], smoothed: list[float], skip: int = 0) -> float | None:
    """The rate where d smoothed / d log(rate) is lowest, up to the lowest smoothed loss.

    Args:
        skip: points at the start that are left out.

    Returns:
        None where the loss falls nowhere there, or there are fewer than three points.
    """
    if len(rates) < 3:
        return None
    lowest = int(np.argmin(smoothed[skip:]))
    slopes = np.gradient(np.asarray(smoothed), np.log(rates))[skip:][: lowest + 1]
    steep = int(np.argmin(slopes))
    return rates[skip + steep] if slopes[steep] < 0 else None
