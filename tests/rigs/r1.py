"""R1: Linear(4,8)-ReLU-Dropout(.1)-Linear(8,2) on 40 samples in batches of 4: 10 updates an epoch.

A probe writes down, as lines of JSON, what every update used and drew; hooks break a run off at a
given event.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from phaseloop import (
    Accuracy,
    Data,
    Hook,
    Order,
    Phases,
    Run,
    Schedule,
    Stage,
    Task,
    Trainer,
    Warmup,
)
from phaseloop.engine import replica
from phaseloop.engine.backends import Backend, Ddp, Horovod
from phaseloop.engine.events import EVENTS
from phaseloop.engine.schedules import composite, constant, cosine, multi_step
from phaseloop.hooks import (
    barrier,
    checkpoint,
    learning_rate,
    meter_sync,
    metrics_file,
    non_finite,
    row_sync,
)
from tests.rigs import process

SAMPLES = 40
BATCH = 4
UPDATES = SAMPLES // BATCH
"""Updates in an epoch."""

TEST_SAMPLES = 6
"""Samples of the test set, where there is one; in batches of 4 they make two."""


class Samples(Dataset[Any]):
    """Points in four dimensions, each with its class and its index.

    Args:
        count: how many.
        augment: add a random amount, drawn from all three generators.
    """

    def __init__(self, count: int = SAMPLES, augment: bool = False) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = (self.x.sum(dim=1) > 0).long()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.x[index]
        if self.augment:
            x = x + 0.1 * (random.random() + np.random.rand() + torch.rand(4))
        return {"input": x, "target": self.y[index], "index": index}


def network(seed: int = 0, extra: int = 0) -> nn.Sequential:
    """The model.

    Args:
        extra: width of one more linear layer, whose outputs are not used.
    """
    # Replicas that are threads share the generator, and would draw into each other's weights.
    with replica.one_at_a_time, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)]
        if extra:
            layers[1] = _WithExtra(extra)
        return nn.Sequential(*layers)


class _WithExtra(nn.ReLU):
    """A ReLU with parameters that get gradients of zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.extra = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * self.extra.weight.sum()


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """``sgd``: learning rate .1, momentum .9; ``adam``: .01."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def schedule(name: str, interval: str = "update") -> Schedule:
    """One of the schedules that a resume has to continue, warm-up in 4 updates or 1 epoch."""
    warmup = Warmup(start=1e-3, **({"updates": 4} if interval == "update" else {"epochs": 1}))
    builds = {
        "constant": constant(),
        "warmup_cosine": cosine(),
        "multi_step": multi_step([0.5, 0.8]),
        "composite": composite(
            [{"name": "linear", "start": 0.01, "end": 0.2}, {"name": "cosine", "start": 0.2}],
            [0.3, 0.7],
        ),
    }
    warm = warmup if name.startswith("warmup") else None
    return Schedule(builds[name], warmup=warm, interval=interval)


class Plan:
    """A schedule by its name, which can be sent to another process."""

    def __init__(self, name: str, interval: str = "update") -> None:
        self.name = name
        self.interval = interval


def _as_started() -> Backend | None:
    """What :mod:`tests.rigs.ranks` has started this process for; None: it has not."""
    if "HOROVOD_RANK" in os.environ:
        return Horovod()
    return Ddp() if "RANK" in os.environ else None


def make_task(
    folder: Path | None,
    *,
    epochs: int | None = 3,
    optimizer_name: str = "sgd",
    augment: bool = False,
    workers: int = 0,
    test: bool | Sequence[str] | Mapping[str, Data] = False,
    data: Mapping[str, Any] | None = None,
    phases: Mapping[str, Any] | Sequence[Stage] | None = None,
    run: Mapping[str, Any] | None = None,
    extra: int = 0,
    **options: Any,
) -> Task:
    """A task of R1.

    Args:
        folder: the run's folder.
        test: with a test set, or with several of these names, tested at each epoch's end unless
            ``phases`` says otherwise; each next one has one sample more. Or the sets themselves.
        data, phases, run: further options of the training data, the phases and the run; phases
            may be a list of stages.
        options: further options of the task; a schedule may be a :class:`Plan`.
    """
    plan = options.get("schedule")
    if isinstance(plan, Plan):
        options["schedule"] = schedule(plan.name, plan.interval)
    model = options.pop("model", None) or network(extra=extra)
    settings: dict[str, Any] = {
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": optimizer(optimizer_name, model),
        "train": Data(Samples(augment=augment), BATCH, workers=workers, **(data or {})),
        "phases": phases if isinstance(phases, list) else Phases(epochs=epochs, **(phases or {})),
        "train_meters": {"accuracy": Accuracy()},
        "backend": _as_started(),
    }
    if test:
        settings["test"] = (
            test
            if isinstance(test, Mapping)
            else {
                name: Data(Samples(TEST_SAMPLES + more, augment), BATCH, workers=workers)
                for more, name in enumerate(["test"] if test is True else test)
            }
        )
        settings["test_meters"] = {"accuracy": Accuracy()}
    place = None if folder is None else str(folder)
    settings["run"] = Run(dir=place, threads=1, **{"log_every": 1, **(run or {})})
    return Task(model=model, **{**settings, **options})


def make_hooks(
    probe: Path | None = None, save: Mapping[str, Any] | None = None, **more: Hook
) -> dict[str, Hook]:
    """The hooks of R1.

    Args:
        probe: the file of the probe's lines; None: no probe.
        save: options of the checkpoint hook.
        more: hooks of the test, which come after the checkpoint when their order is the same.
    """
    hooks: dict[str, Hook] = {
        "meter_sync": meter_sync.MeterSync(),
        "barrier": barrier.Barrier(),
        "learning_rate": learning_rate.LearningRate(),
        "non_finite": non_finite.NonFinite(),
        "row_sync": row_sync.RowSync(),
        "metrics_file": metrics_file.MetricsFile(),
        "checkpoint": checkpoint.Checkpoint(**(save or {})),
    }
    if probe is not None:
        hooks["probe"] = Probe(probe)
    return {**hooks, **more}


def train(
    folder: Path,
    probe: Path | None = None,
    *,
    save: Mapping[str, Any] | None = None,
    hooks: Mapping[str, Hook] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train R1 in ``folder``; how it ended, as plain Python.

    Args:
        probe: the file of the probe's lines.
        save: options of the checkpoint hook.
        hooks: further hooks.
        options: see :func:`make_task`.
    """
    task = make_task(folder, **options)
    outcome = Trainer(task, make_hooks(probe, save, **(hooks or {}))).train()
    return {**vars(outcome), "final": dict(outcome.final), "best": dict(outcome.best)}


def train_until(calls: int, number: int, *args: Any, **options: Any) -> dict[str, Any]:
    """:func:`train`, and at the ``calls``-th call or return this process gets signal ``number``."""
    process.after_calls(calls, number)
    try:
        return train(*args, **options)
    finally:
        sys.setprofile(None)


def count_calls(*args: Any, **options: Any) -> int:
    """The number of calls and returns that :func:`train_until` may choose from."""
    return process.count_calls(train, *args, **options)


# --- probes ---


def draws() -> list[float]:
    """One draw from each of the three generators."""
    return [random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))]


class Probe(Hook):
    """Writes a line for every update, every test, and every start and end of a phase.

    Lines are only added, so that those of an interrupted process stay; each names its process.
    The rate is the one that the optimizer had when its step was called. Numbers are drawn at
    every update and in test phases too.

    Args:
        path: the file; of several processes each but the first has one of its own beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ids: list[int] = []
        self._rates: list[float] = []

    def on_start(self, task: Task) -> None:
        if task.backend.rank:
            self.path = probe_of_rank(self.path, task.backend.rank)
        for opt in task.optimizers.values():
            opt.register_step_pre_hook(self._note_rates)
        self._write(task, "resumed" if task.resumed else "started")

    def on_phase_start(self, task: Task) -> None:
        self._ids = []
        self._write(task, "phase_start", draws=draws())

    def on_forward(self, task: Task) -> None:
        assert task.batch is not None
        self._ids += task.batch.data["index"].tolist()

    def on_step(self, task: Task) -> None:
        if not task.train:
            draws()
        elif task.accumulator.closed:
            loss = None if task.loss is None else float(task.loss)  # None: nothing was collated
            self._write(
                task, "update", ids=self._ids, rates=self._rates, draws=draws(),
                loss=loss, counted=task.updated, steps=task.progress.steps,
            )  # fmt: skip
            self._ids, self._rates = [], []

    def on_phase_end(self, task: Task) -> None:
        ids = [] if task.train else sorted(self._ids)
        self._write(task, "phase_end", draws=draws(), ids=ids, metrics=task.phase.metrics)
        self._ids = []

    def _note_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._rates += [group["lr"] for group in optimizer.param_groups]

    def _write(self, task: Task, kind: str, **fields: Any) -> None:
        progress = task.progress
        line = {"process": os.getpid(), "kind": kind, "phase": task.phase.name,
                "update": progress.updates, "epoch": progress.epoch,
                "windows": progress.windows, **fields}  # fmt: skip
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def probe_of_rank(probe: Path, rank: int) -> Path:
    """Where a rank writes, of several processes."""
    return probe.with_name(f"{probe.name}.{rank}") if rank else probe


def lines(probe: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """What a probe wrote, of one kind or all."""
    found = [json.loads(line) for line in probe.read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def lives(probe: Path, kind: str = "update") -> list[list[dict[str, Any]]]:
    """What a probe wrote, by process, oldest first; the processes that wrote nothing of the kind
    are there with an empty list."""
    processes = dict.fromkeys(line["process"] for line in lines(probe))
    return [[x for x in lines(probe, kind) if x["process"] == p] for p in processes]


# --- hooks that break a run off ---


class ToldError(Exception):
    """What ``At(..., "raise")`` raises."""


class At(Hook):
    """Does something at one event, once.

    Args:
        event: its name.
        updates: ``progress.updates`` there.
        action: number of a signal that this process sends itself; ``stop``: ask for a stop;
            ``raise``: raise :class:`ToldError`.
        phase: name of the phase.
        order: where it stands; by default after the checkpoint.
        position: batches of the phase that are done; None: whatever.
        in_flight: also while a checkpoint is being written; else that is waited for first, so
            that one knows which is the newest.
        rank: only in this one of several processes; None: in all.
    """

    saves = True  # only so may it stand behind the checkpoint hook

    def __init__(
        self,
        event: str,
        updates: int,
        action: int | str = signal.SIGKILL,
        *,
        phase: str = "train",
        order: int = Order.CHECKPOINT,
        position: int | None = None,
        in_flight: bool = False,
        rank: int | None = None,
    ) -> None:
        self.rank = rank
        self.event = event
        self.updates = updates
        self.action = action
        self.phase = phase
        self.order = order  # type: ignore[misc]
        self.position = position
        self.in_flight = in_flight
        self.done = False

    def at(self, event: str, task: Task) -> None:
        if self.done or event != self.event or task.progress.updates != self.updates:
            return
        if task.phase.name != self.phase or self.position not in (None, task.phase.position):
            return
        if self.rank not in (None, task.backend.rank):
            return
        self.done = True
        if not self.in_flight:
            task.writer.settle()
        if self.action == "stop":
            task.request_stop("the test asked for it")
        elif self.action == "raise":
            raise ToldError(f"{event} at {self.updates}")
        else:
            os.kill(os.getpid(), int(self.action))


def _listen(event: str) -> Any:
    def method(self: At, task: Task, *_: Any) -> None:
        self.at(event, task)

    return method


for _event in EVENTS:
    setattr(At, _event, _listen(_event))


class SkipSome(Hook):
    """Skips the third and the seventh window of every epoch."""

    def on_gradients(self, task: Task) -> None:
        if task.progress.windows % 4 == 2:
            task.skip_update("asked for by the test")


class Counter(Hook):
    """Counts phases and steps by the name of their phase: state that tests move too."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_phase_start(self, task: Task) -> None:
        self._count(f"{task.phase.name} starts")

    def on_step(self, task: Task) -> None:
        self._count(f"{task.phase.name} steps")

    def on_phase_end(self, task: Task) -> None:
        self._count(f"{task.phase.name} ends")

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = dict(state["counts"])

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
