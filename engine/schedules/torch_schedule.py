"""Torch's own schedulers, moved by the run's progress and saved with it."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from phaseloop.engine.errors import (
    CheckpointError,
    ConfigError,
    MetricError,
    PhaseloopError,
    listing,
    nearest,
)
from phaseloop.engine.facts import fact_of
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.schedules.batch_scale import ScaleWithBatch

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")

_OF_SWALR = (SWALR._cosine_anneal, SWALR._linear_anneal)


class TorchSchedule:
    """A scheduler of ``torch.optim.lr_scheduler``, and when it moves.

    Args:
        make: a function of the optimizer that makes it.
        interval: ``update`` (the default): it moves with updates that counted; ``epoch``: with
            completed epochs.
        frequency: it moves once for so many of them, counted over the whole run.
        metric: for ``ReduceLROnPlateau``: name of a metric, such as ``test/loss``. It moves once
            for each new value.
        strict: a metric that is not there is an error; False: it is left out, with one warning.
        scale_with_batch: multiply the optimizer's rate by what the batch size asks for, before
            the scheduler is made.
        key: where it stands in the configuration, for messages.

    Raises:
        ConfigError: options that contradict each other or are out of range.
    """

    def __init__(
        self,
        make: Callable[[Optimizer], LRScheduler],
        *,
        interval: str | None = None,
        frequency: int = 1,
        metric: str | None = None,
        strict: bool = True,
        scale_with_batch: ScaleWithBatch | None = None,
        key: str = "schedule",
    ) -> None:
        if interval not in (None, "update", "epoch"):
            raise ConfigError(f"{key}.interval", f"{interval!r} is not 'update' or 'epoch'")
        if frequency < 1:
            raise ConfigError(f"{key}.frequency", f"{frequency} is less than 1")
        if metric is not None and (interval is not None or frequency != 1):
            name = "interval" if interval is not None else "frequency"
            raise ConfigError(
                f"{key}.{name}", f"says nothing with a metric: it moves once per value of {metric}"
            )
        if metric is None and not strict:
            raise ConfigError(f"{key}.strict", "says nothing without a metric")
        self.make = make
        self.interval = interval or "update"
        self.frequency = frequency
        self.metric = metric
        self.strict = strict
        self.scale_with_batch = scale_with_batch
        self.key = key

    def check_kind(self, kind: type[LRScheduler]) -> None:
        """Raises ConfigError for a metric where such a scheduler takes none, or the reverse."""
        takes = "metrics" in inspect.signature(kind.step).parameters
        if takes and self.metric is None:
            raise ConfigError(f"{self.key}.metric", f"{kind.__name__} needs one, such as test/loss")
        if self.metric is not None and not takes:
            raise ConfigError(f"{self.key}.metric", f"{kind.__name__} takes no metric")

    def facts(self) -> dict[str, Any]:
        """What makes this schedule the one it is; the scheduler has its own state to compare."""
        return {
            "interval": self.interval,
            "frequency": self.frequency,
            "metric": self.metric,
            "scale_with_batch": fact_of(self.scale_with_batch),
        }


class Mover:
    """One optimizer's scheduler of torch's, and how often it has moved.

    It moves when the next update asks for its rate, so that until then the groups hold what the
    last update used. How often it should have moved follows from the progress alone: whatever was
    skipped or interrupted, it catches up with exactly that.

    Args:
        schedule: how it is made, and when it moves.
        optimizer: whose groups it sets.

    Raises:
        ConfigError: ``make`` gives no scheduler, or one that does not go with ``metric``.
    """

    def __init__(self, schedule: TorchSchedule, optimizer: Optimizer) -> None:
        self.schedule = schedule
        self.optimizer = optimizer
        self.scheduler = schedule.make(optimizer)
        self.moves = 0
        self._pending: list[float] = []
        self._groups = len(optimizer.param_groups)
        self._warned = False
        if not isinstance(self.scheduler, LRScheduler):
            kind = type(self.scheduler).__name__
            raise ConfigError(schedule.key, f"{kind} is not a scheduler of torch.optim")
        if self.scheduler.optimizer is not optimizer:
            raise ConfigError(schedule.key, "the scheduler was made for another optimizer")
        schedule.check_kind(type(self.scheduler))

    def set(self, updates_done: int, epochs_done: int) -> None:
        """Move as often as so many updates and epochs ask for."""
        if self.schedule.metric is not None:
            while self._pending:
                self._move(self._pending.pop(0))
            return
        done = updates_done if self.schedule.interval == "update" else epochs_done
        while self.moves < done // self.schedule.frequency:
            self._move()

    def check_metric(self, task: Task) -> None:
        """At the start: the metric can come, and the scheduler waits for the right direction.

        Raises:
            ConfigError: no phase reports it (with ``strict``), or a higher value is better and
                the scheduler's ``mode`` is ``min``, or the reverse.
        """
        metric = self.schedule.metric
        if metric is None:
            return
        known = [f"{phase}/{n}" for phase, meters in task.meter_sets.items() for n in meters.names]
        phase, _, meter = metric.partition("/")
        if f"{phase}/{meter.split('/')[0]}" not in known:
            self._missing(known, at_start=True)
        elif self.schedule.strict:
            task.stages.check_comes(metric, f"{self.schedule.key}.metric")
        higher, mode = task.direction(metric), getattr(self.scheduler, "mode", None)
        if higher is not None and mode == ("min" if higher else "max"):
            raise ConfigError(
                f"{self.schedule.key}.mode",
                f"is {mode!r}, but a {'higher' if higher else 'lower'} {metric} is better",
            )

    def observe(self, task: Task) -> None:
        """At a phase's end: note the metric, if it is this phase's.

        Raises:
            MetricError: the phase has ended without it (with ``strict``).
        """
        metric, phase = self.schedule.metric, task.phase
        if metric is None or metric.split("/")[0] != phase.name:
            return
        if metric in phase.metrics:
            self._pending.append(float(phase.metrics[metric]))
        else:
            self._missing(phase.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python and tensors."""
        return {
            "class": type(self.scheduler).__name__,
            "moves": self.moves,
            "pending": list(self._pending),
            "warned": self._warned,
            "scheduler": _plain(self.scheduler.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse of :meth:`state_dict`.

        Raises:
            CheckpointError: it is the state of another kind of scheduler.
        """
        here = type(self.scheduler).__name__
        if state["class"] != here:
            raise CheckpointError(f"the checkpoint has a {state['class']}, this task a {here}")
        self.moves, self._pending = state["moves"], list(state["pending"])
        self._warned = state["warned"]
        self.scheduler.load_state_dict(_as_in(self.scheduler.state_dict(), state["scheduler"]))

    def _move(self, *metrics: float) -> None:
        if len(self.optimizer.param_groups) != self._groups:
            raise PhaseloopError(
                f"a parameter group was added after {type(self.scheduler).__name__} was made, "
                f"which cannot follow; use a schedule by name"
            )
        # torch warns of a scheduler that moves before the optimizer has; it may have in the
        # process before this one, and has in any case.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.moves += 1
        try:
            self.scheduler.step(*metrics)  # type: ignore[arg-type]
        except ValueError as error:  # of OneCycleLR, whose total_steps are over
            name = type(self.scheduler).__name__
            raise ConfigError(self.schedule.key, f"{name} at move {self.moves}: {error}") from None

    def _missing(self, known: Iterable[str], at_start: bool = False) -> None:
        known = list(known)
        metric = self.schedule.metric or ""
        text = (
            f"no metric is called {metric!r}.{nearest(metric, known)} There are: {listing(known)}"
        )
        if self.schedule.strict and at_start:
            raise ConfigError(f"{self.schedule.key}.metric", text)
        if self.schedule.strict:
            raise MetricError(f"{self.schedule.key}.metric: {text}")
        if not self._warned:
            self._warned = True
            log.warning("%s.metric: %s", self.schedule.key, text, extra=ALIKE)


def _plain(value: Any) -> Any:
    """Without types of their own: ``MultiStepLR`` keeps its milestones in a Counter.

    ``SWALR`` of torch 2.9 names its function too, which a fresh one has by itself.
    """
    if isinstance(value, Mapping):
        kept = {k: item for k, item in value.items() if not (callable(item) and item in _OF_SWALR)}
        return {key: _plain(item) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def _as_in(template: Any, value: Any) -> Any:
    """The reverse of :func:`_plain`; ``template`` is the state of a fresh scheduler."""
    if isinstance(template, Counter):
        return Counter(value)
    if isinstance(template, Mapping):
        return {key: _as_in(template.get(key), item) for key, item in value.items()}
    if isinstance(template, list) and len(template) == len(value):
        return [_as_in(a, b) for a, b in zip(template, value, strict=True)]
    return value
