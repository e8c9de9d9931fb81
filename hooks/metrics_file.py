"""Hook ``metrics_file``: every row as a line of JSON in ``metrics.jsonl``."""

import json
import math
import time
from pathlib import Path
from typing import Any

from phaseloop.engine.checkpoint.names import position
from phaseloop.engine.errors import CheckpointError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.line_file import LineFile
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task


@register_hook("metrics_file", default=True)
class MetricsFile(Hook):
    """One line per log point, one per phase end, one per event such as a skipped update or a save.

    Before the first line that a process writes stands its ``start``: where it began, when, and
    which metrics are better higher. A second one tells of a resume.

    A checkpoint knows how many bytes the file had, and a resume cuts it back to there: each
    update is in it once, whatever happened in between. What a checkpoint counts on is flushed to
    the disk before the checkpoint is written. NaN and infinities are written as strings.

    Args:
        file: its name in the run's folder.
    """

    order = Order.LOG
    only_watches = True

    def __init__(self, file: str = "metrics.jsonl") -> None:
        self.file = file
        self._lines = LineFile(file)
        self._counted: int | None = None  # bytes that the checkpoint knows of
        self._start: dict[str, Any] | None = None  # of this process, until it is written

    def on_start(self, task: Task) -> None:
        self._lines.open(task)
        self._start = {"event": "start", "update": task.progress.updates, "time": _now(),
                       "higher_is_better": _directions(task)}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted = state["bytes"]

    def on_resume(self, task: Task) -> None:
        if self._counted is not None:
            name = Path(task.resumed_from).name
            # What a save cost is known only after it, and so comes behind what it counts; and so
            # do the starts of processes that went on from it and did not come to the next one.
            self._lines.keep(self._counted, task, lambda line: _is_of(line, name))
        self._counted = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._lines.path is None else {"bytes": self._lines.size()}

    def files(self) -> list[Path]:
        return [] if self._lines.path is None else [self._lines.path]

    def on_step(self, task: Task) -> None:
        if task.recorder.events:
            self._write_events(task, task.recorder.events)
        if task.recorder.due and task.train:
            self._write(self._position(task) | task.recorder.row())

    def on_phase_end(self, task: Task) -> None:
        self._write_events(task, task.recorder.events)
        metrics = task.phase.metrics
        if metrics:
            self._write(self._position(task) | {"time": _now()} | metrics)

    def on_end(self, task: Task, outcome: Any) -> None:
        self._write_events(task, task.recorder.waiting)
        self._lines.close()

    def _write_events(self, task: Task, events: list[dict[str, Any]]) -> None:
        for event in events:
            self._write({"phase": task.phase.name, **event})

    @staticmethod
    def _position(task: Task) -> dict[str, Any]:
        progress = task.progress
        stage = {"stage": task.stages.label(progress.stage)} if task.stages.several else {}
        place = {"phase": task.phase.name, "update": progress.updates, "epoch": progress.epoch}
        return {**stage, **place, "samples": progress.samples}

    def _write(self, row: dict[str, Any]) -> None:
        if not self._lines.is_open:
            return
        if self._start is not None:
            start, self._start = self._start, None
            self._write({"phase": row["phase"], **start})
        plain = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        self._lines.add(json.dumps(plain).encode() + b"\n")


def _now() -> float:
    return round(time.time(), 3)


def _directions(task: Task) -> dict[str, bool]:
    """By metric, as far as its meter says: whether higher is better."""
    names = [name for meters in task.meter_sets.values() for name in meters.metrics]
    known = {name: task.direction(name) for name in names}
    return {name: higher for name, higher in known.items() if higher is not None}


def _is_of(line: bytes, checkpoint: str) -> bool:
    """The line tells of a start, or what it cost to save this checkpoint or an earlier one."""
    try:
        row = json.loads(line)
        if row.get("event") == "start":
            return True
        return row.get("event") == "save" and position(row["checkpoint"]) <= position(checkpoint)
    except (ValueError, KeyError, AttributeError, CheckpointError):
        return False
