"""From the loss to the update: weighting, clipping, the optimizers, in one fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from phaseloop.engine.data.batch import Batch
from phaseloop.engine.data.plan import Window
from phaseloop.engine.errors import ConfigError, PhaseloopError

if TYPE_CHECKING:
    from phaseloop.engine.task import Task


class Accumulator:
    """What has been done in the window at hand, and how each loss has to be weighted.

    A loss is the mean over its micro-batch's samples (or over the weight that the step gives).
    The batch's mean is sum(n_i * mean_i) / sum(n_i): so a loss is multiplied by n_i over the
    batch's samples before backward, and by nothing when that is 1. With explicit weights the sum
    is known only at the window's end, and the gradients are divided once then.

    Attributes:
        taken: micro-batches of the window that were handed out or found empty.
        closed: no window is open.
        applied: the window's update was made, or skipped.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.begin(Window((), 0, 0))
        self.closed = True

    def begin(self, window: Window) -> None:
        """Start a window; nothing of the one before is kept."""
        self.closed = False
        self.window = window
        self.taken = 0
        self.applied = False
        self._contributed = 0
        self._last: Batch | None = None
        self._explicit: Tensor | float | None = None

    @property
    def full(self) -> bool:
        """Every micro-batch of the window was taken."""
        return self.taken == len(self.window.pieces)

    @property
    def has_gradients(self) -> bool:
        """At least one backward was run in this window."""
        return self._last is not None

    def weigh(self, loss: Tensor, batch: Batch, weight: Tensor | float | None) -> Tensor:
        """The loss as backward has to see it.

        Args:
            loss: mean loss of the micro-batch, one element.
            batch: the micro-batch; how many of its samples count is known from the plan.
            weight: what the loss is a mean over, where it is not over samples.

        Raises:
            PhaseloopError: some losses of one window have a weight and others have none.
        """
        if self._last is not None and (weight is None) != (self._explicit is None):
            raise PhaseloopError(_MIXED)
        if self._last is not batch:  # a step may call backward for several parts of a loss
            self._last = batch
            self._contributed += batch.weight
        if weight is None:
            total = self.window.samples
            if batch.weight == total:
                return loss
            return loss * (batch.weight * self._world_size / total)
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        self._explicit = weight if self._explicit is None else self._explicit + weight
        return loss * weight

    def correction(self) -> Tensor | float | None:
        """What every gradient has to be multiplied by at the window's end; None: nothing.

        With explicit weights, one over their sum. Otherwise more than 1 only where samples had no
        part in the window, because the collate function or the step gave nothing for them.
        """
        if self._explicit is not None:
            if isinstance(self._explicit, Tensor):
                # A window without a valid element has gradients of zero, not 0 / 0.
                return torch.where(self._explicit == 0, 1.0, 1.0 / self._explicit)
            return 1.0 / self._explicit if self._explicit else None
        if 0 < self._contributed < self.window.share:
            return self.window.share / self._contributed
        return None


_MIXED = (
    "backward(loss, weight=...) and backward(loss) were both used in one window; "
    "give every micro-batch of a window a weight, or none"
)


def apply_update(task: Task) -> None:
    """The window's end: everything between the last backward and ``on_update``.

    Order: average over processes, correct the weighting, ``on_gradients`` (learning rate, finite
    check, users' hooks), clip, optimizers, gradients to None, ``on_update``.
    """
    if count_groups(task.optimizers) != task.groups:  # a hook added one inside this window
        task.find_parameters()
    parameters = task.trainable
    task.accumulator.applied = True
    task.skip_reason = task.gradient_norm = None
    task.backend.reduce_gradients(parameters)
    factor = task.accumulator.correction()
    if factor is not None:
        _scale(parameters, factor)
    task.hooks.on_gradients(task)
    if task.skip_reason is None:
        settings = task.gradients
        if settings.clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, settings.clip_value)
        if settings.clip_norm is not None:
            task.gradient_norm = torch.nn.utils.clip_grad_norm_(
                parameters, settings.clip_norm, norm_type=settings.norm_type
            )
        if task.unset_rates:
            _check_rates(task)
        for optimizer in task.optimizers.values():
            task.backend.optimizer_step(optimizer)
        task.updated = True
    clear(parameters)
    if task.updated:
        task.hooks.on_update(task)


def _check_rates(task: Task) -> None:
    """At the first update: a schedule that nobody applies would be ignored in silence."""
    if not all(rates.were_set for rates in task.rates.values()):
        raise ConfigError(
            "hooks.learning_rate", "the task has a schedule, and no hook sets the rates by it"
        )
    task.unset_rates = False


def clear(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set all gradients to None, which costs nothing and keeps unused parameters unused."""
    for parameter in parameters:
        parameter.grad = None


def count_groups(optimizers: Mapping[str, Optimizer]) -> int:
    """Parameter groups of all optimizers."""
    groups = 0
    for optimizer in optimizers.values():
        groups += len(optimizer.param_groups)
    return groups


def optimized(optimizers: Mapping[str, Optimizer]) -> list[torch.nn.Parameter]:
    """Every parameter of every optimizer once, in order."""
    found: dict[int, torch.nn.Parameter] = {}
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            found.update({id(p): p for p in group["params"]})
    return list(found.values())


def _scale(parameters: Iterable[torch.nn.Parameter], factor: Tensor | float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
