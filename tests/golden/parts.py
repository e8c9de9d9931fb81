"""What the golden checkpoints were trained with. It may never change: they are resumed with it."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from phaseloop import Hook, Task, register_dataset, register_hook, register_model


@register_dataset("golden_data")
class GoldenData(Dataset):
    """Points in four dimensions, shifted by draws from all three generators, and their class.

    Args:
        samples: how many.
    """

    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))
        self.y = (self.x.sum(dim=1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = 0.1 * (random.random() + np.random.rand() + torch.rand(4))
        return self.x[index] + shift, self.y[index]


@register_model("golden_model")
class GoldenModel(nn.Sequential):
    """With dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2)
        )


@register_hook("golden_counter")
class Counter(Hook):
    """State of a user's hook: a sum of draws."""

    def __init__(self) -> None:
        self.sum = 0.0

    def on_step(self, task: Task) -> None:
        if task.train and task.updated:
            self.sum += random.random() + float(np.random.rand()) + float(torch.rand(()))

    def state_dict(self) -> dict[str, float]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.sum = state["sum"]


@register_hook("golden_stop")
class Stop(Hook):
    """Asks for a stop after an update, as a user might.

    Args:
        update: its number; None: never.
    """

    only_watches = True

    def __init__(self, update: int | None = None) -> None:
        self.update = update

    def on_step(self, task: Task) -> None:
        if task.train and task.progress.updates == self.update:
            task.request_stop("for a golden checkpoint")
