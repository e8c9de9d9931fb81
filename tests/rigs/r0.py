"""R0: one scalar weight w = 0, loss = mean(w * x), plain SGD, learning rate 1.

The gradient of the loss is the mean of x, so w tells what was averaged: after one update it is
minus the mean, after several minus the sum of the means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, Outcome, Phases, Task, TensorData, Trainer


class Scalar(nn.Module):
    """w * x."""

    def __init__(self, w: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def mean_output(output: Tensor, target: Any) -> Tensor:
    """The loss: mean(w * x)."""
    return output.mean()


def numbers(xs: Iterable[float]) -> TensorData:
    """The samples x, one number each."""
    return TensorData(torch.tensor([float(x) for x in xs]))


def r0(
    xs: Iterable[float],
    batch_size: int,
    *,
    w: float = 0.0,
    lr: float = 1.0,
    epochs: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> Task:
    """A task of R0 on ``xs`` in order.

    Args:
        w, lr: start value and learning rate, where they are not 0 and 1.
        data: further options of the training data.
        options: further options of the task.
    """
    model = Scalar(w)
    settings: dict[str, Any] = {
        "criterion": mean_output,
        "optimizer": optimizer(model.parameters(), lr=lr),
        "train": Data(numbers(xs), batch_size, **{"shuffle": False, **(data or {})}),
        "phases": Phases(epochs=epochs),
    }
    return Task(model=model, **{**settings, **options})


class Pair(nn.Module):
    """a * x[0] + b * x[1]: two weights, each with its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * x[:, 0] + self.b * x[:, 1]


def pair(rows: Iterable[Iterable[float]], **options: Any) -> Task:
    """A task with an optimizer for each of two weights, SGD with rate 1, a sample a batch.

    Args:
        rows: the samples, two numbers each, in order.
        options: further options of the task.
    """
    model = Pair()
    samples = torch.tensor([[float(x) for x in row] for row in rows])
    return Task(
        model=model,
        criterion=mean_output,
        optimizer={"a": torch.optim.SGD([model.a], 1.0), "b": torch.optim.SGD([model.b], 1.0)},
        train=Data(TensorData(samples), 1, shuffle=False),
        phases=Phases(epochs=1),
        **options,
    )


def weight(task: Task) -> float:
    """w as it stands."""
    return float(task.bare_model.w.detach())


def train(task: Task, **hooks: Hook) -> Outcome:
    """Train with these hooks and no others."""
    return Trainer(task, hooks).train()
