"""Assembly: a task's parts checked, put on the device, and the run planned; no sample is read."""

from __future__ import annotations

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
from phaseloop.engine.settings import Gradients, Run

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def check(task: Task) -> None:
    """Raises ConfigError or DataError for what is wrong with a task by itself."""
    _check_types(task)
    task.phases.check()
    task.gradients.check()
    task.run.check()
    if TRAIN in task.test_data:
        raise ConfigError("data.test", f"no test set may be called {TRAIN!r}")
    if task.train_data is None and not task.test_data:
        raise ConfigError("data", "there is neither training nor test data")
    if task.train_data is not None:
        task.train_data.check("data.train", train=True)
    for name, data in task.test_data.items():
        data.check("data.test" if name == "test" else f"data.test.{name}", train=False)


def _check_types(task: Task) -> None:
    """What a Python user mixes up most easily, in a sentence and not an AttributeError later."""
    wanted: list[tuple[str, object, type]] = [
        ("phases", task.phases, Phases),
        ("model", task.bare_model, nn.Module),
        ("gradients", task.gradients, Gradients),
        ("run", task.run, Run),
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
    task.freezing.begin()
    task.optimizers = _make_optimizers(task)
    task.find_parameters()
    if task.optimizers and task.freezing.for_good():
        task.freezing.check_left(task.trainable, task.freezing.match((), "freeze"), "freeze")
    clear(task.trainable)  # what was computed before the run is no part of its first update
    task.identity = identity(task)
    task.accumulator = Accumulator(task.backend.world_size)
    _make_loaders(task)
    _plan(task)


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
    for number, (name, data) in sources:
        task.loaders[name] = Loader(
            data,
            train=name == TRAIN,
            source=number,
            seed=task.seed,
            device=task.device,
            world_size=task.backend.world_size,
            rank=task.backend.rank,
        )
    if train is not None and len(train.dataset) < train.batch_size:
        log.warning(
            "data.train: %d samples are fewer than batch_size %d: each epoch is one smaller update",
            len(train.dataset),
            train.batch_size,
        )


def _plan(task: Task) -> None:
    trains = TRAIN in task.loaders and not task.test_only
    windows = task.loaders[TRAIN].windows if trains else 0
    task.plan = PhasePlan(task.phases, windows, list(task.test_data))
    for schedule in task.schedules:
        schedule.plan(task.plan.updates, task.plan.epochs)
    task.unset_rates = bool(task.schedules)
    task.rates = {name: Rates(o, task.schedules) for name, o in task.optimizers.items()}
