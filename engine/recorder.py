"""Recorder: scalars that were measured at an update, kept on the device until they are logged.

A value is written down with a weight; at a log point the weighted mean of all values since the
last one makes a row. Nothing is read from the device between log points.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.errors import PhaseloopError
from phaseloop.engine.marks import mark

_COMPACT_AT = 1024

POSITION = ("stage", "phase", "update", "epoch", "samples", "time", "event")
"""What every row says of itself; no scalar may be called so."""


class _Series:
    """Values of one name since the last log point."""

    __slots__ = ("values", "weights")

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.weights: list[Tensor | float] = []

    def total(self) -> Tensor:
        """Sum of value times weight, in float64 on the values' device."""
        values = torch.stack(self.values).double()
        return torch.dot(values, self._all_weights(values.device))

    def weight(self) -> Tensor | float:
        """Sum of the weights; a tensor on the device where one of them is."""
        if any(isinstance(weight, Tensor) for weight in self.weights):
            return self._all_weights(self.values[0].device).sum()
        return sum(self.weights)

    def _all_weights(self, device: torch.device) -> Tensor:
        if not any(isinstance(weight, Tensor) for weight in self.weights):
            return torch.tensor(self.weights, dtype=torch.float64, device=device)
        return torch.stack(
            [torch.as_tensor(w, dtype=torch.float64, device=device) for w in self.weights]
        )


class Recorder:
    """Scalars of the training, by name.

    Args:
        every: a row is due after every so many updates.

    Attributes:
        to_host: of a lazy device: what it takes to read values of steps that are over. Nothing is
            computed there between steps: each row would be a program of its own.
        due: a row is due at this step; sinks ask for it with :meth:`row`.
        events: what happened at this step that deserves a line of its own, such as a skip.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.to_host: Callable[[list[Tensor]], list[Tensor]] | None = None
        self._full = False
        self.due = False
        self.events: list[dict[str, Any]] = []
        self._later: list[dict[str, Any]] = []
        self._series: dict[str, _Series] = {}
        self._gauges: dict[str, float] = {}
        self._notes: dict[str, float] = {}
        self._row: dict[str, Any] | None = None

    def add(self, name: str, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Write down ``value``, a detached tensor of shape []; weight 0 is left out.

        A weight on the device, of shape [], is not looked at before the log point.
        """
        if not isinstance(weight, Tensor) and weight == 0:
            return
        series = self._series.get(name)
        if series is None:
            _check_name(name)
            series = self._series[name] = _Series()
        series.values.append(value)
        series.weights.append(weight)
        if len(series.values) >= _COMPACT_AT:
            if self.to_host is None:
                self._compact(series)
            else:  # when the step is over
                self._full = True

    def gauge(self, name: str, value: float) -> None:
        """Set a number that is logged as it is now, such as a learning rate."""
        if name not in self._gauges:
            _check_name(name)
        self._gauges[name] = value

    def note(self, name: str, value: float) -> None:
        """Set a number for the row of this log point alone, such as what this machine took.

        It is in no checkpoint. Sinks begin to take the row at order 69, and ``row_sync`` at 65.
        """
        if name not in self._notes:
            _check_name(name)
        self._notes[name] = value

    def event(self, kind: str, **fields: Any) -> None:
        """Note something that happened, to be written as a line of its own."""
        self.events.append({"event": kind, **fields})

    def later(self, kind: str, **fields: Any) -> None:
        """The same for something that happens between two steps: it belongs to the next one."""
        self._later.append({"event": kind, **fields})

    @property
    def waiting(self) -> list[dict[str, Any]]:
        """What :meth:`later` noted and no step has come for; for sinks at the run's end."""
        return self._later

    def begin_step(self) -> None:
        """Forget the row and the events of the step before."""
        if self.due:
            self._series.clear()
            self._notes.clear()
            self._row = None
            self.due = False
        if self.events or self._later:
            self.events, self._later = self._later, []
        if self._full:
            self._full = False
            self._bring()
            for series in self._series.values():
                self._compact(series)

    def tick(self, updates: int) -> None:
        """Called when update number ``updates`` is counted."""
        self.due = updates % self.every == 0

    def row(self) -> dict[str, Any]:
        """Means of everything since the last log point, then gauges and notes.

        Here the host waits for the device, once for all names, however many sinks ask.
        """
        if self._row is None:
            self._row = self._row_of(self._means())
        return self._row

    def state_dict(self) -> dict[str, Any]:
        """What has been recorded and not yet logged, and the gauges."""
        self._bring()
        pending = {} if self.due else self._series
        return {
            "series": {
                name: [torch.stack(s.values), list(s.weights)] for name, s in pending.items()
            },
            "gauges": dict(self._gauges),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self._series = {}
        for name, (values, weights) in state["series"].items():
            series = self._series[name] = _Series()
            series.values, series.weights = list(values.unbind()), list(weights)
        self._gauges = dict(state["gauges"])
        self._row, self.due, self.events = None, False, []

    def load_merged(self, states: list[dict[str, Any]], first: bool) -> None:
        """Those of another number of processes: the first takes all, the others nothing."""
        series: dict[str, list[Any]] = {}
        for state in states if first else []:
            for name, (values, weights) in state["series"].items():
                before, weights_before = series.get(name, (values[:0], []))
                series[name] = [torch.cat([before, values]), [*weights_before, *weights]]
        self.load_state_dict({"series": series, "gauges": states[0]["gauges"]})

    def put_aside(self) -> dict[str, Any]:
        """What :meth:`put_back` needs; values are not copied, since nobody changes them."""
        series = {name: (list(s.values), list(s.weights)) for name, s in self._series.items()}
        return {"series": series, "gauges": dict(self._gauges)}

    def put_back(self, kept: dict[str, Any]) -> None:
        """Forget the values and gauges that came after :meth:`put_aside`; events stay."""
        self._series = {}
        for name, (values, weights) in kept["series"].items():
            series = self._series[name] = _Series()
            series.values, series.weights = list(values), list(weights)
        self._gauges = dict(kept["gauges"])

    def share(self, backend: Backend) -> None:
        """Make the row that of all processes: each value's mean over what all of them recorded.

        Every process has to call it, at the same log point. Gauges and notes stay its own.
        """
        names = _agreed_names(backend, list(self._series))
        sums = torch.zeros(2, len(names), dtype=torch.float64)
        read = self._read()
        for number, name in enumerate(names):
            if name in read:
                sums[0, number], sums[1, number] = read[name]
        totals = zip(names, *backend.total_on_host(sums).tolist(), strict=True)
        means = {name: total / weight for name, total, weight in totals if weight}
        self._row = self._row_of(means)

    def _row_of(self, means: dict[str, float]) -> dict[str, Any]:
        return {"time": round(time.time(), 3), **means, **self._gauges, **self._notes}

    def _means(self) -> dict[str, float]:
        return {name: total / weight for name, (total, weight) in self._read().items() if weight}

    def _read(self) -> dict[str, tuple[float, float]]:
        """By name, the sum of value times weight, and that of the weights; one wait for all."""
        if not self._series:
            return {}
        self._bring()
        found = [(series.total(), series.weight()) for series in self._series.values()]
        on_device = [weight for _, weight in found if isinstance(weight, Tensor)]
        # In one tensor, so that there is one wait: weights on the device behind the totals.
        read = torch.stack([*(total for total, _ in found), *on_device]).tolist()
        totals, rest = read[: len(found)], iter(read[len(found) :])
        weights = [next(rest) if isinstance(w, Tensor) else float(w) for _, w in found]
        return {
            name: (total, weight)
            for name, total, weight in zip(self._series, totals, weights, strict=True)
        }

    def _bring(self) -> None:
        """What a lazy device has, to the host: all of it in one wait."""
        if self.to_host is None:
            return
        series = list(self._series.values())
        weights = [w for s in series for w in s.weights if isinstance(w, Tensor)]
        came = iter(self.to_host([*(v for s in series for v in s.values), *weights]))
        for own in series:
            own.values = [next(came) for _ in own.values]
        for own in series:
            own.weights = [next(came) if isinstance(w, Tensor) else w for w in own.weights]

    @staticmethod
    def _compact(series: _Series) -> None:
        """Replace many values by their sum, on the device, so that memory stays bounded."""
        weight = series.weight()
        mean = series.total() / weight
        if isinstance(weight, Tensor):  # all of them may be 0
            mean = torch.where(weight == 0, 0.0, mean)
        series.values, series.weights = [mean], [weight]


def _agreed_names(backend: Backend, names: list[str]) -> list[str]:
    """The names that any process has, in one order on all.

    Nearly always all have the same; whether so is found by a sum, and only else are they sent.
    """
    if backend.same(mark("\n".join(names))):
        return names
    return sorted({name for own in backend.all_gather_object(names) for name in own})


def _check_name(name: str) -> None:
    if name in POSITION:
        raise PhaseloopError(f"{name!r} says where a row stands; record the value by another name")
