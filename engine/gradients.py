"""From gradients to the update: weighting, clipping, the optimizers, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from phaseloop.engine import shards
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.shards import local

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

Closure = Callable[[], Tensor]


def apply_update(task: Task, closure: Closure | None = None) -> None:
    """Everything between the last backward and ``on_update``, for the optimizers at hand.

    Order: average over processes, correct the weighting, unscale, ``on_gradients`` (learning
    rate, finite check, users' hooks), clip, optimizers, gradients to None, ``on_update``.

    Args:
        closure: makes the gradients and gives the loss, for optimizers that ask for it several
            times a step. It is called here first, so that hooks see gradients before the
            optimizer does; the optimizer's own first call gets what came out of that.
    """
    if count_groups(task.optimizers) != task.groups:  # a hook added one inside this window
        task.find_parameters()
    if task.has_frequencies:
        task.choose_due()
    parameters = task.trainable
    task.skip_reason = task.gradient_norm = None
    task.may_skip, task.left_out = True, {}
    if closure is not None:
        loss = _evaluate(task, closure)
    else:
        _complete(task)
    task.accumulator.applied = task.accumulator.spent = True
    if task.precision.scaler is not None:
        _unscale(task)
    differ = task.agreement is not None and task.hooks.may_differ
    if differ and task.backend.lazy:  # what a hook reads has to be there
        task.backend.mark_step()
    task.hooks.on_gradients(task)
    if differ:
        task.agreement.skips()  # type: ignore[union-attr]
    task.may_skip = False
    if task.skip_reason is not None:
        task.note_skip(task.skip_reason)
        moved = False
    elif not (stepping := _with_gradients(task)):
        task.note_skip("no optimizer had a gradient")
        moved = False
    else:
        if task.clips:
            _clip(task, stepping)
        if task.unset_rates:
            _check_rates(task)
        for name in stepping:
            if closure is None:
                task.backend.optimizer_step(task.optimizers[name])
            else:
                task.optimizers[name].step(_Asked(task, closure, loss))  # type: ignore[arg-type]
        task.moved.update(stepping)
        task.updated = moved = True
    clear(parameters)
    if moved:
        task.hooks.on_update(task)


def _with_gradients(task: Task) -> list[str]:
    """The optimizers at hand that have something to step by: the others do not move."""
    found = []
    for name in task.stepping:
        for parameter in task.parameters_of[name]:
            if parameter.grad is not None:
                found.append(name)
                break
    return found


def _complete(task: Task) -> Tensor | float | None:
    """Make the gradients what the whole batch, over all processes, has for them.

    Returns:
        The sum of the weights that the steps gave, over all processes; None: they gave none.
    """
    weight = task.accumulator.explicit_weight
    if task.agreement is not None:
        weight = _reduce(task, weight)
    factor = task.accumulator.correction(weight)
    if factor is not None:
        _scale(task.trainable, factor)
    return weight


def _reduce(task: Task, weight: Tensor | float | None) -> Tensor | None:
    """Average the gradients over processes, and add up the weights that the step gave.

    Raises:
        PhaseloopError: this process has no loss for a part of its share, for which the others
            would have to be corrected too; or it gives weights where others give none.
    """
    if task.accumulator.lacks:
        raise PhaseloopError(
            f"rank {task.backend.rank} called no backward() for {task.accumulator.lacks} samples "
            f"of update {task.progress.updates + 1}; of several processes each has to, for every "
            f"micro-batch: give a loss of weight 0"
        )
    if task.before_reduce is not None:
        task.before_reduce()
    assert task.agreement is not None
    task.backend.reduce_gradients(task.trainable)  # first: what is wrong there is said there
    task.agreement.check_weights(given=weight is not None)
    if weight is None:
        return None
    if isinstance(weight, Tensor):
        own = weight.to(task.device, torch.float64, copy=True)
    else:  # filled there: nobody waits for a copy
        own = torch.full((), weight, dtype=torch.float64, device=task.device)
    return task.backend.all_reduce(own)


def _evaluate(task: Task, closure: Closure) -> Tensor:
    clear(task.trainable)
    loss = closure()
    own = task.accumulator.explicit_weight
    total = _complete(task)
    if task.agreement is None:
        return loss.detach()
    # Every process has the mean over its share; the optimizer has to see that over the batch, and
    # the same everywhere, since it may go by it.
    window = task.accumulator.window
    part: Tensor | float = window.share / window.samples
    if own is not None and isinstance(total, Tensor):
        part = own / torch.where(total == 0, 1.0, total)  # with no valid element the loss is 0
    whole = task.backend.all_reduce((loss.detach() * part).to(loss.dtype))
    if task.backend.lazy:  # the optimizer reads it
        task.backend.mark_step()
    return whole


class _Asked:
    """The closure as the optimizer sees it: what is known already first, then computed anew."""

    def __init__(self, task: Task, closure: Closure, known: Tensor) -> None:
        self._task = task
        self._closure = closure
        self._known: Tensor | None = known

    def __call__(self) -> Tensor:
        known, self._known = self._known, None
        if known is not None:
            return known
        task = self._task
        first, task.measuring = task.loss, False  # the update's loss is that of its beginning
        try:
            with torch.enable_grad():
                loss = _evaluate(task, self._closure)
            if task.clips:
                norm = task.gradient_norm
                _clip(task, task.stepping)
                task.gradient_norm = norm
        finally:
            task.loss, task.measuring = first, True
        return loss


def _unscale(task: Task) -> None:
    """Gradients without the loss scale; those of an optimizer that overflowed are dropped.

    Here the host waits for the device: one flag for each optimizer.
    """
    scaler = task.precision.scaler
    assert scaler is not None
    optimizers = {name: task.optimizers[name] for name in task.stepping}
    overflowed = scaler.unscale(optimizers, task.backend)
    reason = f"gradients overflowed at loss scale {scaler.last_scale:g}"
    if overflowed and len(overflowed) == len(_with_gradients(task)):
        task.skip_update(reason)
    elif overflowed:
        task.skip_update(reason, *overflowed)


def _clip(task: Task, stepping: Sequence[str]) -> None:
    """Each optimizer's gradients by its own settings: values first, then the norm.

    ``gradient_norm`` is the norm in between.

    Args:
        stepping: those that have gradients; of none, torch clips no values, but raises an error.
    """
    norms: list[Tensor] = []
    ours = task.backend.shards or task.backend.lazy
    clip_value = shards.clip_value if ours else torch.nn.utils.clip_grad_value_
    clip_norm = shards.clip_norm if ours else torch.nn.utils.clip_grad_norm_
    for name in stepping:
        settings, parameters = task.clipping[name], task.parameters_of[name]
        if settings.clip_value is not None:
            clip_value(parameters, settings.clip_value)
        if settings.clip_norm is not None:
            norms.append(clip_norm(parameters, settings.clip_norm, settings.norm_type))
    if norms:
        task.gradient_norm = norms[0]
        if len(norms) > 1:
            kinds = {task.clipping[name].norm_type for name in stepping}
            p = kinds.pop() if len(kinds) == 1 else 2.0
            task.gradient_norm = torch.linalg.vector_norm(torch.stack(norms), p)


def _check_rates(task: Task) -> None:
    """At the first update: a schedule that nobody applies would be ignored in silence."""
    if not all(task.rates[name].were_set for name in task.stepping if name in task.rates):
        raise ConfigError(
            "hooks.learning_rate", "the task has a schedule, and no hook sets the rates by it"
        )
    task.unset_rates = False


def clear(parameters: Iterable[Parameter]) -> None:
    """Set all gradients to None, which costs nothing and keeps unused parameters unused."""
    for parameter in parameters:
        parameter.grad = None


def count_groups(optimizers: Mapping[str, Optimizer]) -> int:
    """Parameter groups of all optimizers."""
    groups = 0
    for optimizer in optimizers.values():
        groups += len(optimizer.param_groups)
    return groups


def optimized(optimizers: Iterable[Optimizer]) -> list[Parameter]:
    """Every parameter of every optimizer once, in order."""
    found: dict[int, Parameter] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update({id(p): p for p in group["params"]})
    return list(found.values())


def _scale(parameters: Iterable[Parameter], factor: Tensor | float) -> None:
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
