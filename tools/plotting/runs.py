"""A run as its folder tells it: ``metrics.jsonl`` and ``resolved.yaml``, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from phaseloop.engine import rows
from phaseloop.engine.errors import ConfigError, nearest
from phaseloop.engine.phases import TRAIN
from phaseloop.engine.run_folder import METRICS, RESOLVED

RATES = "learning rate"
"""The panel of all learning rates."""

LOG_POINTS, PHASE_ENDS = "log points", "phase ends"

_MARKED = ("skip", "roll_back", "end_phase", "fit_memory")
"""Events that are shown where they happened, beside resumes."""


@dataclass
class Series:
    """One metric of one phase: lists of one length, in the order of the file.

    Attributes:
        panel: the metric without its phase; rates share one.
        phase: whose it is.
        kind: ``log points`` or ``phase ends``.
        label: tells it from others of its panel, phase and kind: the group of a rate.
        updates, samples: how far the run was. Samples are of training, over all processes.
        seconds: of work until then: what lay between a kill and the resume is left out.
        values: what was measured; NaN for what is no number.
    """

    panel: str
    phase: str
    kind: str
    label: str = ""
    updates: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class Event:
    """Something that happened once: a resume, a skipped update, a new stage.

    Attributes:
        kind: ``resume``, ``stage``, or as the file calls it.
        text: what is said of it.
        update, samples, seconds: where, as in :class:`Series`.
    """

    kind: str
    text: str
    update: int
    samples: int
    seconds: float


@dataclass
class RunData:
    """All that is known of a run.

    Attributes:
        path: its folder.
        config: every key with its path, such as ``optimizer.lr``, and the value.
        series: curves, in the order they first come.
        events: in the order they happened.
        higher: by metric, ``test/accuracy``: whether higher is better, as far as it is known.
        updates, samples, seconds, epoch: how far it has come.
        training: seconds between rows of training, in which ``trained`` samples were gone
            through: tests are not in it, nor what came before the first row of a process.
    """

    path: Path
    config: dict[str, Any]
    series: list[Series] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    higher: dict[str, bool] = field(default_factory=dict)
    updates: int = 0
    samples: int = 0
    seconds: float = 0.0
    training: float = 0.0
    trained: int = 0
    epoch: int = 0

    def count(self, kind: str) -> int:
        """How many events of this kind there were."""
        return sum(event.kind == kind for event in self.events)

    def speed(self) -> float | None:
        """Training samples per second; None: there are no two rows to tell it by."""
        return self.trained / self.training if self.training > 0 and self.trained else None

    def metrics(self) -> dict[str, Series]:
        """The values at ends of phases, by the metric's name with its phase."""
        return {f"{s.phase}/{s.panel}": s for s in self.series if s.kind == PHASE_ENDS}


def find(given: list[Path]) -> list[Path]:
    """The runs' folders: each given one, or, where it holds runs, all that are below it.

    Raises:
        ConfigError: there is no such folder, or no run in it.
    """
    found: dict[Path, None] = {}
    for path in given:
        if not path.is_dir():
            there = [folder.name for folder in path.parent.glob("*") if _is_run(folder)]
            raise ConfigError(str(path), f"there is no such folder.{nearest(path.name, there)}")
        below = [path] if _is_run(path) else sorted(_below(path))
        if not below:
            raise ConfigError(
                str(path), f"is no run's folder and holds none: a run has {METRICS} in it"
            )
        found.update(dict.fromkeys(below))
    return list(found)


def _is_run(path: Path) -> bool:
    return (path / METRICS).exists() or (path / RESOLVED).exists()


def _below(path: Path) -> set[Path]:
    return {file.parent for name in (METRICS, RESOLVED) for file in path.rglob(name)}


def read(path: Path) -> RunData:
    """What the folder tells. A run made in Python has no ``resolved.yaml``: no keys are known.

    Raises:
        ConfigError: ``resolved.yaml`` or ``metrics.jsonl`` cannot be read.
    """
    try:
        file = path / RESOLVED
        config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
        run = RunData(path, dict(_flat(config if isinstance(config, Mapping) else {})))
        reader = _Reader(run)
        for row in rows.read(path / METRICS):
            reader.take(row)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    return run


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


class _Reader:
    """Goes through the lines of one run, and keeps its clock."""

    def __init__(self, run: RunData) -> None:
        self._run = run
        self._series: dict[tuple[str, str, str, str], Series] = {}
        self._time: float | None = None  # of the row before, in the process at hand
        self._samples: int | None = None  # at the row before, if training went on from there
        self._stage: str | None = None
        self._started = False

    def take(self, row: dict[str, Any]) -> None:
        run = self._run
        kind = row.get("event")
        if kind == "start":
            self._start(row)
            return
        if "time" in row:
            self._tick(row)
        run.updates = row["update"]
        run.samples = row.get("samples", run.samples)
        run.epoch = row.get("epoch", run.epoch)
        if kind is not None:
            if kind in _MARKED:
                self._mark(kind, _told(row))
            return
        self._enter(row.get("stage"))
        for name, value in row.items():
            place = _place(name, row["phase"])
            if place is not None:
                self._add(place, value)

    def _start(self, row: dict[str, Any]) -> None:
        run = self._run
        run.higher.update(row.get("higher_is_better", {}))
        self._time = row.get("time")
        self._samples = None
        if self._started:
            run.updates = row["update"]
            self._mark("resume", f"resumed after update {row['update']:,}")
        self._started = True

    def _tick(self, row: dict[str, Any]) -> None:
        run = self._run
        spent = 0.0 if self._time is None else max(0.0, row["time"] - self._time)
        run.seconds += spent
        samples = row.get("samples")
        if row["phase"] == TRAIN and samples is not None:
            if self._samples is not None:
                run.training += spent
                run.trained += samples - self._samples
            self._samples = samples
        self._time = row["time"]

    def _enter(self, stage: str | None) -> None:
        if stage != self._stage and self._stage is not None:
            self._mark("stage", f"stage {stage}")
        self._stage = stage

    def _mark(self, kind: str, text: str) -> None:
        run = self._run
        run.events.append(Event(kind, text, run.updates, run.samples, run.seconds))

    def _add(self, place: tuple[str, str, str, str], value: Any) -> None:
        run = self._run
        series = self._series.get(place)
        if series is None:
            series = self._series[place] = Series(*place)
            run.series.append(series)
        series.updates.append(run.updates)
        series.samples.append(run.samples)
        series.seconds.append(round(run.seconds, 3))
        series.values.append(_number(value))


def _place(name: str, phase: str) -> tuple[str, str, str, str] | None:
    """Panel, phase, kind and label of a value; None: it says where the row stands."""
    if name in ("phase", "stage", "update", "epoch", "samples", "time"):
        return None
    if name.startswith(f"{phase}/"):
        return name.removeprefix(f"{phase}/"), phase, PHASE_ENDS, ""
    if rows.is_rate(name):
        return RATES, phase, LOG_POINTS, "" if name == "lr" else name
    return name, phase, LOG_POINTS, ""


def _number(value: Any) -> float:
    """NaN and infinities are text in the file; other text is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _told(row: dict[str, Any]) -> str:
    reason = row.get("reason", "")
    what = str(row["event"]).replace("_", " ")
    return f"{what} at update {row['update']:,}{f': {reason}' if reason else ''}"
