"""Optimizers: made and named, and what each of them is given: a frequency, clipping, schedules."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from phaseloop.engine.errors import ConfigError, listing, nearest
from phaseloop.engine.gradients import optimized
from phaseloop.engine.schedules import Rates, Schedule, TorchSchedule
from phaseloop.engine.settings import Gradients
from phaseloop.engine.stepping import NO_SCALED_CLOSURE

if TYPE_CHECKING:
    from phaseloop.engine.data.source import Data
    from phaseloop.engine.phase_plan import PhasePlan
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
    task.given_options = {
        name: [_copies(group) for group in optimizer.param_groups]
        for name, optimizer in task.optimizers.items()
    }
    task.find_parameters()
    for optimizer in task.optimizers.values():
        _check_closure(task, optimizer)


def plan_rates(task: Task, plan: PhasePlan, given: Any, data: Data | None) -> None:
    """Spread each optimizer's schedules over the updates of ``plan`` that will move it.

    Args:
        given: one schedule, several, or a mapping by optimizer.
        data: the training data, whose batch size a schedule may follow.
    """
    _give_back_options(task)
    for name, schedules in planned_schedules(task, plan, given, data).items():
        task.rates[name] = Rates(task.optimizers[name], schedules, _batch_size(data))
    task.unset_rates = bool(all_schedules(given))


def planned_schedules(
    task: Task, plan: PhasePlan, given: Any, data: Data | None
) -> dict[str, list[Schedule | TorchSchedule]]:
    """Each optimizer's own copies of its schedules; arguments as for :func:`plan_rates`.

    Raises:
        ConfigError: one does not fit into the plan.
    """
    names, updates = list(task.optimizers), plan.updates
    found: dict[str, list[Schedule | TorchSchedule]] = {}
    for name in names:
        moves = max(updates // task.every[name], min(updates, 1))
        found[name] = [copy.copy(schedule) for schedule in _schedules_of(given, name, names)]
        for schedule in found[name]:
            if isinstance(schedule, Schedule):
                if plan.endless:
                    schedule.check_endless(plan.why_endless)
                calendar = None if plan.lengths.even else _Calendar(plan, task.every[name])
                schedule.plan(moves, plan.epochs, calendar)
            if schedule.scale_with_batch is not None:
                _check_one_size(data, schedule.key)
    return found


def _give_back_options(task: Task) -> None:
    """A stage begins with the options that the optimizers were made with."""
    for name, optimizer in task.optimizers.items():
        for group, given in zip(optimizer.param_groups, task.given_options[name], strict=False):
            parameters = group["params"]
            group.clear()
            group.update({**_copies(given), "params": parameters})


def _copies(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the parameters; a rate may be a tensor, which schedules change in place."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in options.items()
        if key != "params"
    }


class _Calendar:
    """Epochs in the updates of one optimizer, and the reverse."""

    def __init__(self, plan: PhasePlan, every: int) -> None:
        self._plan = plan
        self._every = every

    def updates_at(self, epochs: float) -> float:
        return self._plan.updates_at(epochs) / self._every

    def epochs_at(self, updates: float) -> float:
        return self._plan.epochs_at(updates * self._every)


def all_schedules(given: Any) -> list[Any]:
    """Every schedule in what a task was given: one, several, or a mapping by optimizer."""
    if isinstance(given, Mapping):
        return [schedule for part in given.values() for schedule in all_schedules(part)]
    return list(given) if isinstance(given, Sequence) else [given]


def all_clipping(given: Any) -> list[Any]:
    """Every setting of gradients in what a task was given."""
    return list(given.values()) if isinstance(given, Mapping) else [given]


def _batch_size(data: Data | None) -> int | None:
    return None if data is None else next(iter(data.sizes.values()))


def _check_one_size(data: Data | None, key: str) -> None:
    if data is not None and len(data.sizes) > 1:
        raise ConfigError(
            f"{key}.scale_with_batch",
            f"the batch size changes with the epoch, {data.sizes}, so there is no one "
            f"rate that follows it; give a schedule of the rate itself",
        )


def _named(task: Task) -> dict[str, Optimizer]:
    given = task.given_optimizer
    if given is None:
        if any(task.stages.data(stage) is not None for stage in task.stages.given):
            raise ConfigError("optimizer", "training needs an optimizer")
        return {}
    if isinstance(given, type) or not (isinstance(given, (Optimizer, Mapping)) or callable(given)):
        raise ConfigError(
            "optimizer",
            "give an optimizer, several by name, or a function of the model that makes them",
        )
    made = given if isinstance(given, (Optimizer, Mapping)) else given(task.bare_model)
    named = {"optimizer": made} if isinstance(made, Optimizer) else dict(made)
    _check_apart(task, named)
    return {name: task.backend.prepare_optimizer(o) for name, o in named.items()}


def _check_apart(task: Task, named: Mapping[str, Optimizer]) -> None:
    """A parameter of two optimizers would be unscaled, clipped and counted twice."""
    taken: dict[int, str] = {}
    for name, optimizer in named.items():
        for parameter in optimized([optimizer]):
            other = taken.setdefault(id(parameter), name)
            if other != name:
                label = task.parameter_names().get(id(parameter), "a parameter")
                raise ConfigError(f"optimizers.{name}", f"{other} moves {label} already")


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
    if not all(facts.takes_window for _, facts in task.stages.steps):
        raise ConfigError(
            "train_step", "LBFGS asks for the loss several times a step: use train_step=closure"
        )
    if task.precision.name == "float16":
        raise ConfigError("precision", NO_SCALED_CLOSURE)
