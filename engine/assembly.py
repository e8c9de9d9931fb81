"""Assembly: a task's parts checked, put on the device, and the run planned; no sample is read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from phaseloop.engine.checkpoint.identity import identity
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.gradients import Accumulator, clear
from phaseloop.engine.phases import TRAIN, PhasePlan, Phases
from phaseloop.engine.registry import train_steps
from phaseloop.engine.schedules import Rates, Schedule
from phaseloop.engine.settings import Debug, Gradients, Run

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def check(task: Task) -> None:
    """Raises ConfigError or DataError for what is wrong with a task by itself."""
    _check_types(task)
    task.debug.check()
    task.whole_phases.check()
    task.gradients.check()
    task.run.check()
    if TRAIN in task.test_data:
        raise ConfigError("data.test", f"no test set may be called {TRAIN!r}")
    if task.train_data is None and not task.test_data:
        raise ConfigError("data", "there is neither training nor test data")
    for key, data in _keys(task).items():
        data.open(task.seed, key)
        data.check(key, train=key == "data.train")


def _keys(task: Task) -> dict[str, Data]:
    """Each set of samples by its place in the configuration."""
    train = {} if task.train_data is None else {"data.train": task.train_data}
    alone = list(task.test_data) == ["test"]
    tests = {"data.test" if alone else f"data.test.{n}": d for n, d in task.test_data.items()}
    return {**train, **tests}


def meters_of(
    name: str, test_meters: Mapping[str, Any], test_data: Mapping[str, Data]
) -> dict[str, Any]:
    """The meters of one test set: its own, if it has any, else those of all sets."""
    own = test_meters.get(name)
    if name in test_data and isinstance(own, Mapping):
        return dict(own)
    return {
        key: meter
        for key, meter in test_meters.items()
        if not (key in test_data and isinstance(meter, Mapping))
    }


def _check_types(task: Task) -> None:
    """What a Python user mixes up most easily, in a sentence and not an AttributeError later."""
    wanted: list[tuple[str, object, type]] = [
        ("phases", task.phases, Phases),
        ("model", task.bare_model, nn.Module),
        ("gradients", task.gradients, Gradients),
        ("run", task.run, Run),
        ("debug", task.debug, Debug),
        *((f"test data {name!r}", data, Data) for name, data in task.test_data.items()),
        *(("schedule", schedule, Schedule) for schedule in task.schedules),
    ]
    if task.train_data is not None:
        wanted.append(("train", task.train_data, Data))
    for name, given, cls in wanted:
        if not isinstance(given, cls):
            raise ConfigError(
                name, f"a {type(given).__name__} was given where a {cls.__name__} is due"
            )


def resolve_step(step: str | Callable[[Any], None]) -> tuple[Callable[[Any], None], bool]:
    """The step to call, and whether it declared to call the model as a whole."""
    if isinstance(step, str):
        entry = train_steps.get(step)
        made = entry.target() if isinstance(entry.target, type) else entry.target
        return made, bool(entry.declared["whole_model_forward"])
    if not callable(step):
        raise ConfigError("train_step", f"{step!r} is neither a registered name nor callable")
    declared = next((e for e in train_steps if e.target in (step, type(step))), None)
    return step, bool(declared and declared.declared["whole_model_forward"])


def build(task: Task) -> None:
    """Everything on the device, and the run planned.

    Raises:
        PhaseloopError: called again: what a run leaves behind is no start for another.
    """
    if task.optimizers or task.loaders:
        raise PhaseloopError("this task was trained already; make another one")
    if not task.bare_model.training:
        log.warning("the model is in evaluation mode and is trained so; call model.train()")
    task.backend.setup()
    _place_modules(task)
    task.optimizers = _make_optimizers(task)
    task.find_parameters()
    clear(task.trainable)  # what was computed before the run is no part of its first update
    task.identity = identity(task)
    task.accumulator = Accumulator(task.backend.world_size)
    _make_loaders(task)
    _plan(task)
    _say_debug(task)


def _place_modules(task: Task) -> None:
    task.precision.prepare(task.bare_model)
    task.model = task.backend.prepare_model(task.bare_model)
    if isinstance(task.criterion_module, nn.Module):
        task.precision.prepare(task.criterion_module)
        task.criterion_module.to(task.device)
    for meters in task.meter_sets.values():
        meters.to(task.device)


def _make_optimizers(task: Task) -> dict[str, Optimizer]:
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


def _make_loaders(task: Task) -> None:
    train = task.train_data
    training = {} if train is None else {TRAIN: train}
    # Numbered among its kind: a test draws the same whether there is training data or not.
    sources = [*enumerate(training.items()), *enumerate(task.test_data.items())]
    for (number, (name, data)), key in zip(sources, _keys(task), strict=True):
        is_train = name == TRAIN
        task.loaders[name] = Loader(
            data,
            train=is_train,
            source=number,
            seed=task.seed,
            device=task.device,
            world_size=task.backend.world_size,
            rank=task.backend.rank,
            key=key,
            at_most=task.debug.overfit if is_train and task.debug.overfit else task.debug.fast,
            repeat=is_train and task.debug.overfit is not None,
        )
    if train is not None:
        _warn_about_batches(train, task.loaders[TRAIN], task.backend.world_size)


def _warn_about_batches(data: Data, loader: Loader, processes: int) -> None:
    largest = max(data.sizes.values())
    if loader.samples < largest:
        log.warning(
            "data.train: %d samples are fewer than batch_size %d: each epoch is one smaller update",
            loader.samples,
            largest,
        )
    pieces = processes * max(len(plan.window(0).pieces) for plan in loader.plans.values())
    if data.batch_transform is not None and pieces > 1:
        log.warning(
            "data.train.batch_transform mixes samples of one micro-batch, and a batch is cut into "
            "%d: that is another update than the whole batch would make",
            pieces,
        )


def _plan(task: Task) -> None:
    trains = TRAIN in task.loaders and not task.test_only
    windows = {1: 0}
    if trains:
        windows = {first: plan.windows for first, plan in task.loaders[TRAIN].plans.items()}
    task.plan = PhasePlan(task.phases, windows, list(task.test_data))
    whole = _whole_plan(task) if trains and task.debug.fast is not None else task.plan
    for schedule in task.schedules:
        schedule.plan(whole.updates, whole.epochs)
    task.unset_rates = bool(task.schedules)
    task.rates = {name: Rates(o, task.schedules) for name, o in task.optimizers.items()}


def _whole_plan(task: Task) -> PhasePlan:
    """The plan that a quick try is the beginning of: schedules are spread over it."""
    plans = task.loaders[TRAIN].plans.items()
    windows = {first: dataclasses.replace(plan, at_most=None).windows for first, plan in plans}
    return PhasePlan(task.whole_phases, windows, list(task.test_data))


def _say_debug(task: Task) -> None:
    if task.debug.fast is not None:
        log.info(
            "debug.fast: %d batches of each phase, one epoch, schedules as in the whole training; "
            "nothing is saved",
            task.debug.fast,
        )
    if task.debug.overfit is not None and TRAIN in task.loaders:
        log.info(
            "debug.overfit: every epoch is the same %d batches of training data, and no others",
            task.loaders[TRAIN].windows,
        )
