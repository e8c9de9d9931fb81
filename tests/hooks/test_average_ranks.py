"""Hook ``average`` on two processes, which each have buffers of their own in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from phaseloop import Data, Hook, Phases, Run, Task, TensorData, Trainer
from phaseloop.engine.backends import Ddp, Fsdp
from phaseloop.hooks.average import Average
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs import ranks

BACKENDS = {"ddp": Ddp, "fsdp": Fsdp}
BUFFERS = ("copy", "average")


class Seen(Hook):
    """The statistics that the last test found in the model, and the metrics of all tests."""

    def __init__(self, stop: int | None) -> None:
        self.stop = stop
        self.mean: list[float] = []
        self.losses: list[float] = []

    def on_step(self, task: Task) -> None:
        if not task.train:
            self.mean = task.bare_model[1].running_mean.tolist()
        elif task.progress.updates == self.stop:
            task.request_stop("the test asks for it")

    def on_phase_end(self, task: Task) -> None:
        if not task.train:
            self.losses.append(task.metrics["test/loss"])


def _train(folder: Path, backend: str, buffers: str, stop: int | None = None) -> Seen:
    torch.manual_seed(1)
    x = torch.randn(24, 4)
    data = TensorData(x, (x.sum(1) > 0).long())
    seen = Seen(stop)
    task = Task(
        model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        criterion=nn.CrossEntropyLoss(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(data, batch_size=8),
        test=Data(data, batch_size=8),
        phases=Phases(epochs=2),
        backend=BACKENDS[backend]("cpu"),
        run=Run(dir=str(folder), threads=1),
    )
    hooks = {
        "meter_sync": MeterSync(),
        "average": Average(decay=0.5, buffers=buffers),
        "checkpoint": Checkpoint(background=False),
        "seen": seen,
    }
    Trainer(task, hooks).train()
    return seen


def _all(folder: Path) -> Any:
    """By backend and kind of buffers, what a whole run has seen and one that was broken off."""
    found = {}
    for backend in BACKENDS:
        for buffers in BUFFERS:
            whole, broken = (folder / f"{backend}-{buffers}-{n}" for n in ("whole", "broken"))
            one = _train(whole, backend, buffers)
            _train(broken, backend, buffers, stop=4)
            again = _train(broken, backend, buffers)
            found[backend, buffers] = (one.mean, one.losses, again.mean, again.losses)
    return found


def test_every_process_tests_the_primarys_buffers_also_after_a_resume(tmp_path: Path) -> None:
    first, second = ranks.results(_all, tmp_path)
    assert first == second  # of each test the model, and the metric, are those of all
    for mean, losses, mean_again, losses_again in first.values():
        assert len(losses) == 2 and len(losses_again) == 1  # the other one was before the stop
        assert (mean_again, losses_again[-1]) == (mean, losses[-1])
