"""Hook ``metrics_file``: every row as a line of JSON in ``metrics.jsonl``."""

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import IO, Any

from phaseloop.engine.checkpoint.names import position
from phaseloop.engine.disk import flush
from phaseloop.engine.errors import CheckpointError
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


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
        self._open: IO[bytes] | None = None
        self._path: Path | None = None
        self._counted: int | None = None  # bytes that the checkpoint knows of
        self._start: dict[str, Any] | None = None  # of this process, until it is written
        # The run was in this folder before. Else its rows are another machine's, which is said.
        self._expected = False

    def on_start(self, task: Task) -> None:
        if task.folder is None or not task.primary:
            return
        self._path = Path(task.folder.path) / self.file
        self._expected = self._path.exists() or bool(task.folder.status())
        # Unbuffered, so that a whole line is in the file or none of it.
        self._open = open(self._path, "ab", buffering=0)  # noqa: SIM115 held while the run lasts
        flush(self._path.parent)  # its name, which may be new
        if not task.resumed_here:
            self._open.truncate(0)
        self._start = {"event": "start", "update": task.progress.updates, "time": _now(),
                       "higher_is_better": _directions(task)}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counted = state["bytes"]

    def on_resume(self, task: Task) -> None:
        name = Path(task.resumed_from).name
        if self._open is not None and self._counted is not None:
            there = os.fstat(self._open.fileno()).st_size
            if there < self._counted and self._expected and task.resumed_here:
                log.warning("%s lacks rows from before the checkpoint: it has %d bytes, and had %d",
                            self._path, there, self._counted)  # fmt: skip
            self._open.truncate(_end_of_kept(self._open.name, self._counted, name))
        self._counted = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._path is None else {"bytes": self._path.stat().st_size}

    def files(self) -> list[Path]:
        return [] if self._path is None else [self._path]

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
        if self._open is not None:
            self._write_events(task, task.recorder.waiting)
            self._open.close()
            self._open = None

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
        if self._open is None:
            return
        if self._start is not None:
            start, self._start = self._start, None
            self._write({"phase": row["phase"], **start})
        plain = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
        }
        self._add(json.dumps(plain).encode() + b"\n")

    def _add(self, line: bytes) -> None:
        """The whole line or, with an error, none of it: a full disk takes what it has room for."""
        assert self._open is not None
        before = os.fstat(self._open.fileno()).st_size
        try:
            while line:
                line = line[self._open.write(line) :]
        except OSError:
            self._open.truncate(before)
            raise


def _now() -> float:
    return round(time.time(), 3)


def _directions(task: Task) -> dict[str, bool]:
    """By metric, as far as its meter says: whether higher is better."""
    names = [name for meters in task.meter_sets.values() for name in meters.metrics]
    known = {name: task.direction(name) for name in names}
    return {name: higher for name, higher in known.items() if higher is not None}


def _end_of_kept(path: str, size: int, checkpoint: str) -> int:
    """Bytes of the lines that end within the first ``size``, and of what comes behind them anyhow.

    That is what its own save cost, which is known only after it, and the starts of processes that
    have gone on from it and did not come to the next one. Where checkpoints lie elsewhere the file
    may be of another machine's part of the run, whose lines end at other places.
    """
    with open(path, "rb") as file:
        end = file.read(size).rfind(b"\n") + 1
        file.seek(end)
        for line in file:
            if not _is_of(line, checkpoint):
                break
            end += len(line)
    return end


def _is_of(line: bytes, checkpoint: str) -> bool:
    """The line tells of a start, or what it cost to save this checkpoint or an earlier one."""
    try:
        row = json.loads(line)
        if row.get("event") == "start":
            return True
        return row.get("event") == "save" and position(row["checkpoint"]) <= position(checkpoint)
    except (ValueError, KeyError, AttributeError, CheckpointError):
        return False
