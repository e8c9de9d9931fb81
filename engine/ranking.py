"""Ranking: which value of a metric is better, and what to do when there is no such metric."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from phaseloop.engine.errors import ConfigError, MetricError, listing, nearest

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class Ranking:
    """Compares the values of one metric.

    Args:
        key: where it stands in the configuration, for messages.
        metric: name, such as ``test/accuracy``: the phase's name, a slash, the meter's name.
        mode: ``max`` or ``min``; None: as the metric's meter declares.
        min_delta: least change that counts as better.

    Raises:
        ConfigError: the mode is neither, or min_delta is negative.
    """

    def __init__(
        self, key: str, metric: str, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        if mode not in (None, "max", "min"):
            raise ConfigError(f"{key}.mode", f"{mode!r} is not 'max' or 'min'")
        if min_delta < 0:
            raise ConfigError(f"{key}.min_delta", f"{min_delta} is negative")
        self.key = key
        self.metric = metric
        self.mode = mode
        self.min_delta = min_delta

    def resolve(self, task: Task) -> None:
        """Find the direction.

        Raises:
            ConfigError: no phase or no meter of that name exists, or the direction is neither
                given nor known.
        """
        phase, _, meter = self.metric.partition("/")
        if phase not in task.meter_sets:
            raise ConfigError(
                f"{self.key}.metric",
                f"{self.metric!r} does not begin with the name of a phase: "
                f"{listing(task.meter_sets)}",
            )
        task.stages.check_comes(self.metric, f"{self.key}.metric")
        # Found now and not at the first test, which may be many epochs away.
        meters, known = task.meter_sets[phase].names, task.meter_sets[phase].metrics
        name, _, part = meter.partition("/")
        # One of several values that its meter does not name may come; a mode says what is better.
        may_come = self.metric in known or bool(name in meters and part and self.mode)
        if not may_come and (name not in meters or task.direction(self.metric) is None):
            raise ConfigError(f"{self.key}.metric", self._unknown(known))
        if self.mode is None:
            self._take_direction(task)

    @property
    def by(self) -> list[str | None]:
        """What values are ranked by; scores ranked by something else cannot be compared."""
        return [self.metric, self.mode]

    def score(self, task: Task) -> float | None:
        """The metric at the end of its phase; None at the end of another phase.

        Raises:
            MetricError: the phase has ended without a metric of that name.
        """
        if task.phase.name != self.metric.split("/")[0]:
            return None
        metrics = task.phase.metrics
        if self.metric not in metrics:
            raise MetricError(f"{self.key}.metric: {self._unknown(metrics)}")
        return metrics[self.metric]

    def better(self, score: float, than: float) -> bool:
        """``score`` beats ``than``; a NaN beats nothing, and anything beats a NaN."""
        if score != score:
            return False
        if than != than:
            return True
        gain = score - than if self.mode == "max" else than - score
        return gain > self.min_delta

    def _unknown(self, known: Iterable[str]) -> str:
        return (
            f"no metric is called {self.metric!r}.{nearest(self.metric, known)} "
            f"There are: {listing(known)}"
        )

    def _take_direction(self, task: Task) -> None:
        higher = task.direction(self.metric)
        if higher is None:
            raise ConfigError(
                f"{self.key}.mode",
                f"whether a higher {self.metric!r} is better is not known; give max or min",
            )
        self.mode = "max" if higher else "min"
