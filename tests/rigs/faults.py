"""Faults planted at known places: data, modules and criteria that are not finite for known samples.

Twelve samples of four numbers in order, in batches of four: sample 6 is in update 2 of the first
epoch, and, in micro-batches of two, in its second one. A command line names them by
``imports: [tests.rigs.faults]`` and ``config=fault``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from phaseloop import (
    Hook,
    Task,
    register_criterion,
    register_dataset,
    register_hook,
    register_model,
)

SAMPLES, BATCH, BAD = 12, 4, 6
UPDATE = BAD // BATCH + 1

FAULT = """\
# @package _global_
defaults:
  - override /optimizer: sgd
  - _self_
imports: [tests.rigs.faults]
run: {threads: 1, log_every: 1}
phases: {epochs: 3}
data:
  train: {dataset: {name: fault_data}, batch_size: 4, shuffle: false}
model: {name: fault_model}
criterion: {name: fault_criterion}
hooks: {tensorboard: null, curves: null, progress: null, checkpoint: {every_updates: 1}}
"""


@register_dataset("fault_data")
class FaultData(Dataset):
    """Positive numbers, and targets of 1.

    Args:
        zeros: samples whose numbers are all 0.
        large: samples whose numbers are all 10.
        infinite: samples whose third number is infinite.
        negative: samples whose target is -1.
    """

    def __init__(
        self,
        zeros: list[int] | None = None,
        large: list[int] | None = None,
        infinite: list[int] | None = None,
        negative: list[int] | None = None,
    ) -> None:
        self.x = torch.rand(SAMPLES, 4, generator=torch.Generator().manual_seed(0)) + 0.1
        self.y = torch.ones(SAMPLES)
        self.x[zeros or []] = 0.0
        self.x[large or []] = 10.0
        for index in infinite or []:
            self.x[index, 2] = float("inf")
        self.y[negative or []] = -1.0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Share(nn.Module):
    """Each number over the sum of its sample: 0 / 0 where all are 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(1, keepdim=True)


class Exponential(nn.Module):
    """The softmax of 50 x as nobody should write it: infinity / infinity for a large sample."""

    def forward(self, x: Tensor) -> Tensor:
        powers = (50 * x).exp()
        return powers / powers.sum(1, keepdim=True)


class Length(nn.Module):
    """The length of each sample's vector: where it is 0, it has no derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).square().sum(1, keepdim=True).sqrt().expand(-1, 4)


class Masked(nn.Module):
    """Infinities that do no harm, as a mask of attention has them."""

    def forward(self, x: Tensor) -> Tensor:
        logs = x.detach().log()
        scores = x.masked_fill(x < 0.2, float("-inf"))
        both = torch.cat([scores, x + logs.clamp(min=-9.0)], 1)
        return both.softmax(1)[:, :4]


@register_model("fault_model")
class FaultModel(nn.Sequential):
    """One of the modules above, dropout, a linear layer.

    Args:
        kind: ``none``, ``share``, ``exponential``, ``length`` or ``masked``.
    """

    def __init__(self, kind: str = "none") -> None:
        kinds = {
            "none": nn.Identity,
            "share": Share,
            "exponential": Exponential,
            "length": Length,
            "masked": Masked,
        }
        super().__init__(kinds[kind](), nn.Dropout(0.1), nn.Linear(4, 1))


@register_criterion("fault_criterion")
class Criterion:
    """The mean of (output - log(target))**2: not a number for a negative target."""

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0] - target.log()).square().mean()


@register_criterion("infinite_step")
class InfiniteStep(nn.Module):
    """The mean, 1e30 times: the gradients are finite, and times a large rate they are not."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return output.mean() * 1e30


@register_hook("fault_skip")
class Skip(Hook):
    """Skips the first window of the run.

    Args:
        scale: multiply its gradients by this before.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def on_gradients(self, task: Task) -> None:
        if task.progress.windows == 0 and task.progress.epoch == 1:
            for parameter in task.trainable:
                assert parameter.grad is not None
                parameter.grad *= self.scale
            task.skip_update("asked for by the test")
