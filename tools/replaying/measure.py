"""What is measured at the updates of a replay, and what the run's log has of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine import rows
from phaseloop.engine.device_kinds import kind_of
from phaseloop.engine.events import Hook, Order
from phaseloop.engine.recorder import Recorder
from phaseloop.engine.task import Task
from phaseloop.hooks.metrics_file import MetricsFile

# What ends a stretch of a step: what the time until then was for, and what comes next.
_PARTS = {
    "on_forward": ("forward", "loss"),
    "on_loss_and_meter": ("loss", "loss"),
    "on_backward": ("backward", "forward"),
    "on_gradients": ("optimizer", "update"),
    "on_update": ("optimizer", "forward"),
}


def log_rows(folder: Path, hooks: Mapping[str, Hook]) -> list[dict[str, Any]]:
    """The rows of a run's log, as they stand in its ``metrics.jsonl``."""
    files = [folder / hook.file for hook in hooks.values() if isinstance(hook, MetricsFile)]
    return [row for file in files for row in rows.read(file)]


def losses(log: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The rows of log points, by update."""
    return {
        row["update"]: row for row in log if row["phase"] == "train" and any(map(rows.is_loss, row))
    }


class Tap(Recorder):
    """A recorder that also keeps what was recorded at the update at hand."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self.measured: list[tuple[str, Tensor, Tensor | float]] = []

    def add(self, name: str, value: Tensor, weight: Tensor | float = 1.0) -> None:
        super().add(name, value, weight)
        self.measured.append((name, value, weight))

    def means(self) -> dict[str, float]:
        """The weighted mean of each name. Here the host waits for the device."""
        sums: dict[str, tuple[float, float]] = {}
        for name, value, weight in self.measured:
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + float(value.double() * weight), weights + float(weight)
        return {name: total / weight for name, (total, weight) in sums.items() if weight}


class Clock(Hook):
    """What the parts of an update take, seen by the first hook at every event.

    Attributes:
        parts: seconds by part.
        exact: wait for the device at every mark.
        stage: what the step is at: ``forward``, ``loss`` or ``update``.
    """

    order = Order.SYNC_METERS
    only_watches = True

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.exact = False
        self.stage = "forward"
        self._last = time.perf_counter()
        self._device = torch.device("cpu")

    def on_start(self, task: Task) -> None:
        self._device = task.device

    def on_phase_start(self, task: Task) -> None:
        self._last = time.perf_counter()

    def reset(self) -> None:
        """The next update begins."""
        self.parts, self.stage = {}, "forward"
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """The time since the last mark was for ``part``."""
        if self.exact:
            kind_of(self._device).wait(self._device)
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now


def _marker(part: str, stage: str) -> Any:
    def mark(self: Clock, task: Task) -> None:
        if task.train:
            self.mark(part)
            self.stage = stage

    return mark


for _event, _names in _PARTS.items():
    setattr(Clock, _event, _marker(*_names))


def rates(task: Task) -> dict[str, float]:
    """Learning rates that the last update used."""
    return {
        f"{name}/{number}" if len(optimizer.param_groups) > 1 else name: float(group["lr"])
        for name, optimizer in task.optimizers.items()
        for number, group in enumerate(optimizer.param_groups)
        if "lr" in group
    }


def bits(task: Task) -> dict[str, str]:
    """A checksum of the loss, every parameter and every buffer."""
    found = {} if task.loss is None else {"the loss": task.loss}
    found |= {name: value for name, value in task.raw_state().items() if isinstance(value, Tensor)}
    return {name: _checksum(value) for name, value in found.items()}


def _checksum(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
