"""Hook ``console``: says what is trained, a line per test or epoch, and how the run ended."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from phaseloop.engine import plan_report
from phaseloop.engine.data.source import Data
from phaseloop.engine.data.stream import StreamLoader
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.phases import LENGTHS, TRAIN
from phaseloop.engine.registry import register_hook
from phaseloop.engine.report import (
    Throughput,
    aligned,
    by_epoch,
    counted,
    duration,
    learning_rates,
    number,
)
from phaseloop.engine.shards import class_name
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

log = logging.getLogger("phaseloop")

Rows = list[tuple[str, str]]


@register_hook("console", default=True)
class Console(Hook):
    """Speaks on the primary, through the logger ``phaseloop`` at INFO: so into ``log.txt`` too.

    A line comes after each test phase, and after a train phase that no test follows.
    """

    order = Order.LOG
    only_watches = True

    def __init__(self) -> None:
        self._speed = Throughput()
        self._first_step = 0
        self._phases = 0

    def on_start(self, task: Task) -> None:
        self._first_step = task.progress.steps
        self._phases = 0
        self._speed.start(task.progress.samples)
        if task.primary:
            _say(_header(task))

    def on_phase_start(self, task: Task) -> None:
        self._phases += 1
        if task.train:
            self._speed.start(task.progress.samples)
        else:
            self._speed.pause()

    def on_phase_end(self, task: Task) -> None:
        self._phases += 1
        if task.train:
            self._speed.pause()
        elif task.progress.epoch_open:
            self._speed.go_on()
        # The line of the test that follows tells about the training too.
        if task.primary and not (task.train and task.progress.tests_due):
            log.info("%s", "  ".join(self._line(task)))

    def on_end(self, task: Task, outcome: Outcome) -> None:
        if not task.primary:
            return
        idle = task.resumed and not self._phases and task.progress.steps == self._first_step
        if outcome.status == "failed":
            _say(_failed(task, outcome))
        elif idle and outcome.signal is None:
            _say(_nothing_done(task, outcome))
        else:
            _say(_done(task, outcome))

    def _line(self, task: Task) -> Iterable[str]:
        progress, plan = task.progress, task.plan
        if plan.trains:
            yield plan_report.epoch(task)
            yield f"update {progress.updates:>{len(str(task.stages.updates))}}"
        # In mid-epoch the train metrics are those of the epoch before.
        if plan.trains and not progress.epoch_open:
            yield from _metrics(TRAIN, task.metrics)
        if not task.train:
            yield from _metrics(task.phase.name, task.phase.metrics)
        if plan.trains and (rates := learning_rates(task.optimizers)):
            yield rates
        speed = self._speed.rate(progress.samples)
        if speed is not None:
            yield f"{speed:,.0f} samples/s"


def _say(rows: Rows) -> None:
    for line in aligned(rows):
        log.info("%s", line)


def _metrics(phase: str, metrics: Mapping[str, float]) -> Iterable[str]:
    """``test loss 0.0987``, ``accuracy 0.9812``: the phase is named once."""
    prefix = f"{phase}/"
    label = f"{phase} "
    for name, value in metrics.items():
        if name.startswith(prefix):
            yield f"{label}{name.removeprefix(prefix)} {number(value):>6}"
            label = ""


def _header(task: Task) -> Rows:
    sizes = [f"{name} {plan_report.samples(loader)}" for name, loader in task.loaders.items()]
    rows = [
        ("model", _model(task)),
        ("data", ", ".join(sizes)),
        *_phases(task),
        ("machine", _machine(task)),
        ("run folder", str(task.folder.path) if task.folder else "none: nothing is saved"),
    ]
    if task.resumed and not task.test_only:
        rows.append(("resumed", plan_report.position(task)))
    return rows


def _model(task: Task) -> str:
    parameters = list(task.bare_model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    parts = [class_name(task.bare_model), counted(total, "parameter")]
    if trainable != total:
        parts.append(f"{trainable:,} of them trainable")
    return ", ".join(parts + task.model_options.describe())


def _phases(task: Task) -> Rows:
    if task.test_only or not any(plan.trains for plan in task.stages.plans()):
        return [("phases", "test only")]
    rows: Rows = []
    for index, plan in enumerate(task.stages.plans()):
        name = f"{task.stages.label(index)}: " if task.stages.several else ""
        data = task.stages.data(task.stages.given[index])
        parts = [plan_report.length(plan), *([] if data is None else _batch(data))]
        if tested := plan_report.cadence(plan):
            parts.append(tested)
        rows.append(("" if rows else "phases", name + ", ".join(parts)))
    return rows


def _batch(data: Data) -> list[str]:
    parts = [f"batch size {by_epoch(data.sizes)}"]
    if data.micro_batch_size is not None:
        parts.append(f"micro-batches of {data.micro_batch_size:,}")
    if data.accumulate is not None:
        parts.append(f"{data.accumulate:,} micro-batches each")
    return parts


def _machine(task: Task) -> str:
    processes = task.backend.world_size
    parts = [task.backend.described(), counted(torch.get_num_threads(), "thread")]
    if processes > 1:
        parts.append(f"{processes:,} processes")
    return ", ".join(parts)


def _done(task: Task, outcome: Outcome) -> Rows:
    amount = f"{counted(outcome.updates, 'update')}, {counted(_epochs(task), 'epoch')}"
    if task.test_only:
        return [("tested", task.resumed_from), *_results(outcome)]
    spent = f"{duration(outcome.seconds)}{' since the resume' if task.resumed else ''}"
    rows = [(outcome.status, f"{amount}, {spent}")]
    if outcome.reason:
        rows.append(("reason", outcome.reason))
    return rows + _results(outcome) + _places(task)


def _nothing_done(task: Task, outcome: Outcome) -> Rows:
    amount = f"after {counted(outcome.updates, 'update')}"
    if outcome.status == "finished":
        lengths = {name: getattr(task.phases, name) for name in LENGTHS}
        number = task.progress.stage
        stage = f"{task.stages.given[number].name}." if task.stages.several else ""
        keys = [f"phases.{stage}{key} (now {n})" for key, n in lengths.items() if n is not None]
        first = ("already finished", f"{amount}: nothing to do")
        more = f"the same command with a larger {' or '.join(keys)}"
    else:
        first = ("already stopped", f"{amount}: {outcome.reason}")
        more = "the same command with the setting changed that the reason names"
        loader = task.loaders[TRAIN]
        if isinstance(loader, StreamLoader) and loader.used_up:
            more = f"there is nothing to go on with: {loader.key} is used up"
    anew = "another run.dir, or run.resume=never, which puts this run aside"
    rows = [first, *_results(outcome), ("to go on", more)]
    return [*rows, ("to start anew", anew), *_places(task)]


def _failed(task: Task, outcome: Outcome) -> Rows:
    amount = f"after {counted(outcome.updates, 'update')}, {duration(outcome.seconds)}"
    return [("failed", amount), *_places(task)]


def _results(outcome: Outcome) -> Rows:
    rows = []
    for name, value in outcome.final.items():
        best = outcome.best.get(name)
        extra = "" if best is None else f"  best {number(best):>6}"
        rows.append((name, f"{number(value):>6}{extra}"))
    return rows


def _places(task: Task) -> Rows:
    """Where things are; only what is there."""
    if task.folder is None:
        return []
    root = Path(task.folder.path)
    places = {
        "run folder": root,
        "curves": root / "curves.png",
        "checkpoints": task.folder.checkpoints,
        "tensorboard": root / "tensorboard",
    }
    if task.store is None or not task.store.names():
        del places["checkpoints"]
    return [
        (label, str(path))
        for label, path in places.items()
        if not isinstance(path, Path) or path.exists()
    ]


def _epochs(task: Task) -> int:
    """Epochs completed."""
    return task.progress.epoch - task.progress.epoch_open
