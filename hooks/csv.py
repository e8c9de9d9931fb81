"""Hook ``csv``: the rows of the log points and phase ends as a table, in ``metrics.csv``."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.line_file import LineFile
from phaseloop.engine.registry import register_hook
from phaseloop.engine.task import Task

FIRST = ("time", "stage", "phase", "epoch", "update", "samples")


@register_hook("csv")
class Csv(Hook):
    """One row per log point and one per phase end, for a spreadsheet or ``pandas.read_csv``.

    Columns are ``time`` (seconds since 1970), ``stage`` (of a run that has several), ``phase``,
    ``epoch``, ``update`` and ``samples`` (done in training by then), then the names of the values
    in the order in which they first came; a cell without a value is empty.
    A column that comes late is put behind the others, in all rows, by replacing the file at once.

    A resume cuts the table back to what its checkpoint had, rows and columns.

    Args:
        file: its name in the run's folder.
    """

    order = Order.LOG
    only_watches = True

    def __init__(self, file: str = "metrics.csv") -> None:
        self.file = file
        self._lines = LineFile(file)
        self._columns = list(FIRST)
        self._counted: int | None = None  # bytes that the checkpoint knows of

    def on_start(self, task: Task) -> None:
        self._lines.open(task)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._columns, self._counted = list(state["columns"]), state["bytes"]

    def on_resume(self, task: Task) -> None:
        if self._counted is None or not self._lines.is_open:
            return
        if (self._head() or self._columns) != self._columns:  # of rows that are cut off
            self._arrange()
        self._lines.keep(self._counted, task)
        self._counted = None

    def state_dict(self) -> dict[str, Any]:
        if self._lines.path is None:
            return {}
        return {"columns": list(self._columns), "bytes": self._lines.size()}

    def files(self) -> list[Path]:
        return [] if self._lines.path is None else [self._lines.path]

    def on_step(self, task: Task) -> None:
        if task.recorder.due and task.train and self._lines.is_open:
            self._write(task, task.recorder.row())

    def on_phase_end(self, task: Task) -> None:
        if task.phase.metrics and self._lines.is_open:
            self._write(task, {"time": round(time.time(), 3), **task.phase.metrics})

    def on_end(self, task: Task, outcome: Any) -> None:
        self._lines.close()

    def _write(self, task: Task, values: Mapping[str, Any]) -> None:
        progress = task.progress
        place = {
            "stage": task.stages.label(progress.stage),
            "phase": task.phase.name,
            "epoch": progress.epoch,
            "update": progress.updates,
            "samples": progress.samples,
        }
        row = {**values, **place}
        late = [name for name in row if name not in self._columns]
        self._columns += late
        if not self._lines.size():
            self._lines.add(_line(self._columns))
        elif late:
            self._arrange()
        self._lines.add(_line([row.get(name, "") for name in self._columns]))

    def _head(self) -> list[str]:
        """The names of the file's columns; empty: it is empty."""
        assert self._lines.path is not None
        with open(self._lines.path, newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])

    def _arrange(self) -> None:
        """Give every row of the file the columns that there are now."""
        assert self._lines.path is not None
        with open(self._lines.path, newline="", encoding="utf-8") as old:
            rows = csv.DictReader(old, restval="")
            self._lines.rewrite(lambda new: _copy(rows, self._columns, new))


def _copy(rows: Iterable[Mapping[str, str]], columns: Sequence[str], file: IO[bytes]) -> None:
    file.write(_line(columns))
    for row in rows:
        file.write(_line([row.get(name, "") for name in columns]))


def _line(cells: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
