"""Hook ``timing``: where the time goes: data, forward, loss, backward, update, each hook."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from phaseloop.engine.device_kinds import kind_of
from phaseloop.engine.events import Hook
from phaseloop.engine.parts import PARTS
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.registry import register_hook
from phaseloop.engine.report import duration
from phaseloop.engine.stopwatch import REST, Stopwatch
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

log = logging.getLogger("phaseloop")

Seconds = Mapping[str, float]

_DIGITS = 6


@register_hook("timing")
class Timing(Hook):
    """Logs each part's share of the time, from 0 to 1: ``time/data``, ``time/forward``,
    ``time/hook/NAME`` ... At a log point of the training since the last one, and with it
    ``time/ms``, milliseconds per update; at the end of a phase, as a line of its own in
    ``metrics.jsonl``, of that phase; at the end of the run as a table, in the log.

    A part is without what lies within it: what hooks do in ``forward`` is theirs. So the shares
    add up to 1, ``time/rest`` among them, which is in no part. Each process has its own times; the
    primary's are logged. They are of this process: a resume begins anew.

    Args:
        sync: wait for the device at the borders of parts. A GPU works on while the host goes on,
            so without this a part's time is what the host needs to ask for it, and the device's
            shows where a value is waited for; with it the parts are right, and the whole is slower.
            On a CPU it changes nothing.
    """

    only_watches = True

    def __init__(self, sync: bool = False) -> None:
        self.sync = sync
        self._watch: Stopwatch | None = None
        self._trained: list[str] = []  # names of train phases
        self._logged: Seconds = {}  # of the training, at the last log point
        self._ended: dict[str, Seconds] = {}  # by phase, when it was last over
        self._updates = 0
        self._first = 0

    def on_start(self, task: Task) -> None:
        self._updates = self._first = task.progress.updates
        kind, device = kind_of(task.device), task.device

        def synchronised() -> float:
            kind.wait(device)
            return time.perf_counter()

        self._watch = Stopwatch(synchronised if self.sync else time.perf_counter)
        task.parts.watch(self._watch)
        if task.device.type != "cpu" and not self.sync and task.primary:
            log.info(
                "hooks.%s: times are the host's, which does not wait for %s: see %s.sync",
                self.name, task.device, self.name,
            )  # fmt: skip

    def on_step(self, task: Task) -> None:
        if not (task.recorder.due and task.train):
            return
        now = self._training(task)
        for name, share in _shares(_less(now, self._logged)).items():
            task.recorder.note(f"time/{name}", share)
        updates = task.progress.updates - self._updates
        if updates > 0:  # a roll-back takes some away
            spent = sum(now.values()) - sum(self._logged.values())
            task.recorder.note("time/ms", round(1000 * spent / updates, _DIGITS))
        self._logged, self._updates = now, task.progress.updates

    def on_phase_end(self, task: Task) -> None:
        if self._watch is None:
            return
        self._watch.count()
        name = task.parts.phase_name()
        now = dict(self._watch.spent[name])
        spent = _less(now, self._ended.get(name, {}))
        self._ended[name] = now
        shares = {f"time/{part}": share for part, share in _shares(spent).items()}
        seconds = round(sum(spent.values()), _DIGITS)
        stage = {"stage": task.stages.label(task.progress.stage)} if task.stages.several else {}
        update = task.progress.updates
        task.recorder.event("time", **stage, update=update, seconds=seconds, **shares)

    def on_end(self, task: Task, outcome: Outcome) -> None:
        if self._watch is None:
            return
        self._watch.count()
        task.parts.unwatch(self._watch)
        if task.primary and self._watch.spent:
            for line in _table(self._watch.spent, outcome.updates - self._first):
                log.info("%s", line.rstrip())
        self._watch = None

    def _training(self, task: Task) -> Seconds:
        """Seconds of all train phases of this process until now, by part."""
        assert self._watch is not None
        self._watch.count()
        name = task.parts.phase_name()
        if name not in self._trained:
            self._trained.append(name)
        total: dict[str, float] = {}
        for one in self._trained:
            for part, seconds in self._watch.spent[one].items():
                total[part] = total.get(part, 0.0) + seconds
        return total


def _less(now: Seconds, before: Seconds) -> dict[str, float]:
    """What has come since."""
    return {part: seconds - before.get(part, 0.0) for part, seconds in now.items()}


def _shares(spent: Seconds) -> dict[str, float]:
    whole = sum(spent.values())
    if whole <= 0:
        return {}
    return {part: round(spent[part] / whole, _DIGITS) for part in _in_order(spent)}


def _in_order(parts: Mapping[str, object]) -> list[str]:
    """The engine's parts, then hooks as they came, then the rest."""
    last = [REST] if REST in parts else []
    hooks = [part for part in parts if part not in PARTS and part != REST]
    return [*(part for part in PARTS if part in parts), *hooks, *last]


def _table(spent: Mapping[str, Seconds], updates: int) -> list[str]:
    """A row for each part, a column for each phase.

    Args:
        updates: that the training has made.
    """
    totals = {name: sum(own.values()) for name, own in spent.items()}
    rows = [("time by part", list(spent))]
    for part in _in_order({part: None for own in spent.values() for part in own}):
        rows.append((part, [_cell(own.get(part), totals[name]) for name, own in spent.items()]))
    rows.append(("total", [duration(seconds) for seconds in totals.values()]))
    if TRAIN in spent and updates > 0:
        each = f"{1000 * totals[TRAIN] / updates:.2f} ms"
        rows.append(("per update", [each if name == TRAIN else "" for name in spent]))
    first = max(len(label) for label, _ in rows)
    widths = [max(len(cells[n]) for _, cells in rows) for n in range(len(spent))]
    return [
        "  ".join([label.ljust(first), *(c.rjust(w) for c, w in zip(cells, widths, strict=True))])
        for label, cells in rows
    ]


def _cell(seconds: float | None, whole: float) -> str:
    if seconds is None or whole <= 0:
        return ""
    return f"{seconds:.3f} s {100 * seconds / whole:5.1f} %"
