"""Optimizers: made and named, and what each of them is given: a frequency, clipping, schedules."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from phaseloop.engine.errors import ConfigError, listing, nearest
from phaseloop.engine.schedules import Rates, Schedule, TorchSchedule
from phaseloop.engine.settings import Gradients
from phaseloop.engine.stepping import NO_SCALED_CLOSURE

if TYPE_CHECKING:
    from phaseloop.engine.phases import PhasePlan
    from phaseloop.engine.task import Task


def make(task: Task) -> None:
    """Make the task's optimizers, and note for each how often it steps and how it clips.

    Raises:
        ConfigError: there are none, a setting is for one that does not exist, none steps at every
            batch, or one needs a closure and does not get it.
    """
    task.optimizers = _named(task)
    names = list(task.optimizers)
    for name, every in task.given_every.items():
        _check_name(name, names, "every")
        if every < 1:
            raise ConfigError(f"optimizers.{name}.every", f"{every} is less than 1")
    task.every = {name: task.given_every.get(name, 1) for name in names}
    task.has_frequencies = any(every > 1 for every in task.every.values())
    if names and min(task.every.values()) > 1:
        raise ConfigError(
            "optimizers",
            f"every update needs an optimizer that it moves: one must have every=1, and they have "
            f"{', '.join(f'{name}: {every}' for name, every in task.every.items())}",
        )
    task.clipping = _clipping(task.gradients, names)
    task.clips = any(given.clips for given in task.clipping.values())
    task.find_parameters()
    for optimizer in task.optimizers.values():
        _check_closure(task, optimizer)


def plan_rates(task: Task, plan: PhasePlan) -> None:
    """Spread each optimizer's schedules over the updates of ``plan`` that will move it."""
    names, updates = list(task.optimizers), plan.updates
    for name in names:
        moves = max(updates // task.every[name], min(updates, 1))
        schedules = [copy.copy(schedule) for schedule in _schedules_of(task.schedules, name, names)]
        for schedule in schedules:
            if isinstance(schedule, Schedule):
                calendar = None if plan.lengths.even else _Calendar(plan, task.every[name])
                schedule.plan(moves, plan.epochs, calendar)
            if schedule.scale_with_batch is not None:
                _check_one_size(task, schedule.key)
        task.rates[name] = Rates(task.optimizers[name], schedules, _batch_size(task))
    task.unset_rates = bool(all_schedules(task.schedules))


class _Calendar:
    """Epochs in the updates of one optimizer, and the reverse."""

    def __init__(self, plan: PhasePlan, every: int) -> None:
        self._lengths = plan.lengths
        self._every = every

    def updates_at(self, epochs: float) -> float:
        return self._lengths.updates_at(epochs) / self._every

    def epochs_at(self, updates: float) -> float:
        return self._lengths.epochs_at(updates * self._every)


def all_schedules(given: Any) -> list[Any]:
    """Every schedule in what a task was given: one, several, or a mapping by optimizer."""
    if isinstance(given, Mapping):
        return [schedule for part in given.values() for schedule in all_schedules(part)]
    return list(given) if isinstance(given, Sequence) else [given]


def all_clipping(given: Any) -> list[Any]:
    """Every setting of gradients in what a task was given."""
    return list(given.values()) if isinstance(given, Mapping) else [given]


def _batch_size(task: Task) -> int | None:
    return None if task.train_data is None else next(iter(task.train_data.sizes.values()))


def _check_one_size(task: Task, key: str) -> None:
    if task.train_data is not None and len(task.train_data.sizes) > 1:
        raise ConfigError(
            f"{key}.scale_with_batch",
            f"the batch size changes with the epoch, {task.train_data.sizes}, so there is no one "
            f"rate that follows it; give a schedule of the rate itself",
        )


def _named(task: Task) -> dict[str, Optimizer]:
    given = task.given_optimizer
    if given is None:
        if task.train_data is not None:
            raise ConfigError("optimizer", "training needs an optimizer")
        return {}
    if isinstance(given, type) or not (isinstance(given, (Optimizer, Mapping)) or callable(given)):
        raise ConfigError(
            "optimizer",
            "give an optimizer, several by name, or a function of the model that makes them",
        )
    made = given if isinstance(given, (Optimizer, Mapping)) else given(task.bare_model)
    named = {"optimizer": made} if isinstance(made, Optimizer) else dict(made)
    return {name: task.backend.prepare_optimizer(o) for name, o in named.items()}


def _clipping(
    given: Gradients | Mapping[str, Gradients], names: Iterable[str]
) -> dict[str, Gradients]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    for name in given:
        _check_name(name, names, "gradients")
    return {name: given.get(name, Gradients()) for name in names}


def _schedules_of(given: Any, name: str, names: Iterable[str]) -> list[Schedule | TorchSchedule]:
    if not isinstance(given, Mapping):
        return all_schedules(given)
    for other in given:
        _check_name(other, names, "schedule")
    return all_schedules(given.get(name, ()))


def _check_name(name: str, names: Iterable[str], key: str) -> None:
    if name not in names:
        raise ConfigError(
            f"{key}.{name}",
            f"no optimizer has that name.{nearest(name, names)} There are: {listing(names)}",
        )


def _check_closure(task: Task, optimizer: Optimizer) -> None:
    """LBFGS is the only optimizer of torch that cannot do without a closure."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    if not task.step_facts.takes_window:
        raise ConfigError(
            "train_step", "LBFGS asks for the loss several times a step: use train_step=closure"
        )
    if task.precision.name == "float16":
        raise ConfigError("precision", NO_SCALED_CLOSURE)
