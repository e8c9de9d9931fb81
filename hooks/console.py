"""Hook ``console``: says what is trained, a line per test or epoch, and how the run ended."""

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from phaseloop.engine.events import Hook, Order
from phaseloop.engine.phases import TRAIN
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
        if plan.updates:
            epochs = str(math.ceil(plan.epochs))
            yield f"epoch {progress.epoch:>{len(epochs)}}/{epochs}"
            yield f"update {progress.updates:>{len(str(plan.updates))}}"
        # In mid-epoch the train metrics are those of the epoch before.
        if plan.updates and not progress.epoch_open:
            yield from _metrics(TRAIN, task.metrics)
        if not task.train:
            yield from _metrics(task.phase.name, task.phase.metrics)
        if plan.updates and (rates := learning_rates(task.optimizers)):
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
    sizes = [f"{name} {counted(loader.samples, 'sample')}" for name, loader in task.loaders.items()]
    rows = [
        ("model", _model(task)),
        ("data", ", ".join(sizes)),
        ("phases", _phases(task)),
        ("machine", _machine(task)),
        ("run folder", str(task.folder.path) if task.folder else "none: nothing is saved"),
    ]
    if task.resumed and not task.test_only:
        rows.append(("resumed", _position(task)))
    return rows


def _model(task: Task) -> str:
    parameters = list(task.bare_model.parameters())
    total = sum(p.numel() for p in parameters)
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    parts = [type(task.bare_model).__name__, counted(total, "parameter")]
    if trainable != total:
        parts.append(f"{trainable:,} of them trainable")
    return ", ".join(parts + task.model_options.describe())


def _phases(task: Task) -> str:
    plan, data = task.plan, task.train_data
    if data is None or task.test_only:
        return "test only"
    epochs = f"{plan.epochs:g} epoch{'' if plan.epochs == 1 else 's'}"
    parts = [
        f"{counted(plan.updates, 'update')} in {epochs} of {by_epoch(_windows(task))}",
        f"batch size {by_epoch(data.sizes)}",
    ]
    if data.micro_batch_size is not None:
        parts.append(f"micro-batches of {data.micro_batch_size:,}")
    if data.accumulate is not None:
        parts.append(f"{data.accumulate:,} micro-batches each")
    return ", ".join(parts + _cadence(task))


def _windows(task: Task) -> dict[int, int]:
    """Epoch to updates in each from there on."""
    return {first: task.plan.windows_in(first) for first in task.loaders[TRAIN].plans}


def _cadence(task: Task) -> list[str]:
    units = {"epoch": task.phases.test_every_epochs, "update": task.phases.test_every_updates}
    every = [
        f"every {unit}" if number == 1 else f"every {number:,} {unit}s"
        for unit, number in units.items()
        if number is not None
    ]
    return [f"test {' and '.join(every)}"] if task.plan.test_sets and every else []


def _machine(task: Task) -> str:
    device = str(task.device)
    if task.device.type == "cuda":
        device = f"{device} ({torch.cuda.get_device_name(task.device)})"
    processes = task.backend.world_size
    parts = [device, counted(torch.get_num_threads(), "thread")]
    if processes > 1:
        parts.append(f"{processes:,} processes")
    return ", ".join(parts)


def _position(task: Task) -> str:
    progress, plan = task.progress, task.plan
    where = "in" if progress.epoch_open else "after"
    return (
        f"{where} epoch {progress.epoch} of {math.ceil(plan.epochs)}, "
        f"after update {progress.updates:,} of {plan.updates:,}"
    )


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
        lengths = {"epochs": task.phases.epochs, "updates": task.phases.updates}
        keys = [f"phases.{key} (now {n:,})" for key, n in lengths.items() if n is not None]
        first = ("already finished", f"{amount}: nothing to do")
        more = f"the same command with a larger {' or '.join(keys)}"
    else:
        first = ("already stopped", f"{amount}: {outcome.reason}")
        more = "the same command with the setting changed that the reason names"
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
    return [(label, str(path)) for label, path in places.items() if path.exists()]


def _epochs(task: Task) -> int:
    """Epochs completed."""
    return task.progress.epoch - task.progress.epoch_open
