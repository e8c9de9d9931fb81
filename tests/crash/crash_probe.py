"""User code of the crash tests: data, model, step, hooks, a probe, faults of the file system.

A copy of it lies in the folder of each scenario, and is named there by ``imports``.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phaseloop import (
    Hook,
    Order,
    Task,
    register_batch_transform,
    register_dataset,
    register_hook,
    register_model,
    register_train_step,
)
from tests.crash import faulty_fs
from tests.rigs import r1, streams

faulty_fs.install_as_told()


@register_dataset("crash_data")
class CrashData(r1.Samples):
    """R1's samples.

    Args:
        count: how many.
        augment: shift them by draws from all three generators.
        seconds: time that each read takes.
    """

    def __init__(self, count: int = 20, augment: bool = False, seconds: float = 0.0) -> None:
        super().__init__(count, augment)
        self.targets = self.y
        self.weights = [1 + n % 3 for n in range(count)]
        self.seconds = seconds

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.seconds:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class _Slow:
    """Takes its time over each sample of a stream, of which each process reads its part."""

    seconds: float
    rank, world_size = 0, 1

    def set_rank(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def order(self) -> list[int]:
        order: list[int] = super().order()  # type: ignore[misc]
        return order[self.rank :: self.world_size]

    def __iter__(self) -> Iterator[Any]:
        iterator = super().__iter__()  # type: ignore[misc]
        return iterator if not self.seconds else _SlowIterator(iterator, self.seconds)


class _SlowIterator(Iterator[Any]):
    def __init__(self, iterator: Any, seconds: float) -> None:
        self.iterator = iterator
        self.seconds = seconds
        for name in ("state_dict", "load_state_dict"):
            if hasattr(iterator, name):
                setattr(self, name, getattr(iterator, name))

    def __next__(self) -> Any:
        time.sleep(self.seconds)
        return next(self.iterator)


@register_dataset("crash_stream")
class CrashStream(_Slow, streams.Stateful):
    """A stream of R1's samples that keeps its state itself."""

    def __init__(self, count: int = 20, augment: bool = False, seconds: float = 0.0) -> None:
        super().__init__(count, augment)
        self.seconds = seconds


@register_dataset("crash_buffered")
class CrashBuffered(_Slow, streams.Buffered):
    """A stream of R1's samples, shuffled, that keeps its state in its iterator."""

    def __init__(self, count: int = 20, augment: bool = False, seconds: float = 0.0) -> None:
        super().__init__(count, augment)
        self.seconds = seconds


@register_model("crash_model")
class CrashModel(nn.Sequential):
    """R1's network, also with batch norm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        if norm:
            self.norm = nn.BatchNorm1d(8)
        self.positive = nn.ReLU()
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(8, 2)


@register_batch_transform("crash_noise")
class Noise:
    """Draws for a whole micro-batch."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        noise = 0.1 * torch.randn_like(batch["input"])
        return {**batch, "input": batch["input"] + noise}


@register_train_step("crash_step")
class StepWithState:
    """The standard step, with a running mean of its loss and something that it carries along.

    What it carries is each process's own; its state is the primary's, so the mean is that of all.
    """

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, task: Task) -> None:
        batch = task.next_batch()
        loss = task.criterion(task.forward(batch.input), batch.target)
        if task.train:
            seen = loss.detach().double()
            loss_of_all = task.backend.all_reduce(seen.clone()) / task.backend.world_size
            self.mean = 0.9 * self.mean + 0.1 * float(loss_of_all)
            task.carry = seen if task.carry is None else task.carry + seen
            task.backward(loss * (1 + 0.01 * math.tanh(self.mean)))
            task.update()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


@register_hook("crash_probe")
class CrashProbe(r1.Probe):
    """R1's probe.

    Args:
        file: where its lines go.
    """

    def __init__(self, file: str) -> None:
        super().__init__(Path(file))

    def _write(self, task: Task, kind: str, **fields: Any) -> None:
        super()._write(task, kind, roll_backs=task.progress.roll_backs, **fields)


@register_hook("crash_counter")
class Counter(r1.Counter):
    """Counts phases and steps."""


@register_hook("crash_skip")
class Skip(r1.SkipSome):
    """Skips windows."""


@register_hook("crash_blow_up")
class BlowUp(Hook):
    """Gradients of NaN at one update, as long as the run has not rolled back.

    Args:
        update: its number.
    """

    order = Order.LEARNING_RATE

    def __init__(self, update: int) -> None:
        self.update = update

    def on_gradients(self, task: Task) -> None:
        if task.progress.updates + 1 == self.update and not task.progress.roll_backs:
            for parameter in task.trainable:
                if parameter.grad is not None:
                    parameter.grad.fill_(math.nan)


@register_hook("crash_clock")
class Clock(Hook):
    """The time of day jumps: an hour back after update 3, a day forward after update 7.

    Args:
        start: seconds that it is off from the beginning.
    """

    only_watches = True
    order = Order.DEFAULT

    def __init__(self, start: float = 0.0) -> None:
        self._jumped = start

    def on_start(self, task: Task) -> None:
        self._time = time.time
        time.time = lambda: self._time() + self._jumped

    def on_step(self, task: Task) -> None:
        jumps = {3: -3600.0, 7: 86400.0}
        if task.train and task.updated:
            self._jumped += jumps.get(task.progress.updates, 0.0)

    def on_end(self, task: Task, outcome: Any) -> None:
        time.time = self._time


@register_hook("crash_at")
class At(Hook):
    """A signal at one event, once.

    Args:
        event: its name.
        updates: ``progress.updates`` there.
        number: the signal.
    """

    only_watches = True
    saves = True  # only so may it stand behind the checkpoint hook
    order = Order.CHECKPOINT

    def __init__(self, event: str, updates: int, number: int = signal.SIGKILL) -> None:
        self.at = r1.At(event, updates, number)

    def on_step(self, task: Task) -> None:
        self.at.at("on_step", task)

    def on_forward(self, task: Task) -> None:
        self.at.at("on_forward", task)


@register_hook("crash_move")
class Move(Hook):
    """Renames the run's folder after one update.

    Args:
        updates: ``progress.updates`` there.
        to: its new path.
    """

    only_watches = True
    order = Order.LOG

    def __init__(self, updates: int, to: str) -> None:
        self.updates = updates
        self.to = to

    def on_step(self, task: Task) -> None:
        if task.train and task.progress.updates == self.updates and task.folder is not None:
            os.rename(task.folder.path, self.to)
