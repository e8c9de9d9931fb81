"""Assembly: a task's parts checked, put on the device, and the run planned; no sample is read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import nn

from phaseloop.engine import optimizers
from phaseloop.engine.accumulator import Accumulator
from phaseloop.engine.checkpoint.identity import identity
from phaseloop.engine.data.loader import Loader
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.gradients import clear
from phaseloop.engine.phases import TRAIN, PhasePlan, Phases
from phaseloop.engine.precision import Precision
from phaseloop.engine.schedules import Schedule
from phaseloop.engine.settings import Gradients, Run

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def check(task: Task) -> None:
    """Raises ConfigError or DataError for what is wrong with a task by itself."""
    _check_types(task)
    task.phases.check()
    for settings in optimizers.all_clipping(task.gradients):
        settings.check()
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
        *(("gradients", given, Gradients) for given in optimizers.all_clipping(task.gradients)),
        ("precision", task.precision, Precision),
        ("run", task.run, Run),
        *((f"test data {name!r}", data, Data) for name, data in task.test_data.items()),
        *(("schedule", given, Schedule) for given in optimizers.all_schedules(task.schedules)),
    ]
    if task.train_data is not None:
        wanted.append(("train", task.train_data, Data))
    for name, given, cls in wanted:
        if not isinstance(given, cls):
            raise ConfigError(
                name, f"a {type(given).__name__} was given where a {cls.__name__} is due"
            )


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
    task.precision.start(task.device)
    optimizers.make(task)
    clear(task.trainable)  # what was computed before the run is no part of its first update
    task.identity = identity(task)
    task.accumulator = Accumulator(task.backend.world_size)
    _make_loaders(task)
    _plan(task)
    if callable(check_step := getattr(task.train_step, "check", None)):
        check_step(task)  # what it needs of the task is missed now, and not at its first call


def _place_modules(task: Task) -> None:
    task.precision.prepare(task.bare_model)
    task.model = task.backend.prepare_model(task.bare_model)
    if isinstance(task.criterion_module, nn.Module):
        task.precision.prepare(task.criterion_module)
        task.criterion_module.to(task.device)
    for meters in task.meter_sets.values():
        meters.to(task.device)


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
    if train is not None and task.step_facts.one_piece:
        _check_one_piece(task.loaders[TRAIN])


def _check_one_piece(loader: Loader) -> None:
    """Steps that make several optimizer steps, or call a closure, do so on a whole batch."""
    pieces = len(loader.plan.window(0).pieces)
    if pieces > 1:
        key = "micro_batch_size" if loader.plan.accumulate is None else "accumulate"
        raise ConfigError(
            f"data.train.{key}",
            f"it cuts a batch into {pieces} micro-batches, and this train step works on whole "
            f"batches only; leave it out",
        )


def _plan(task: Task) -> None:
    trains = TRAIN in task.loaders and not task.test_only
    windows = task.loaders[TRAIN].windows if trains else 0
    task.plan = PhasePlan(task.phases, windows, list(task.test_data))
    optimizers.plan_rates(task)
