"""Assembly: a task's parts checked, put on the device, and the run planned; no sample is read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from phaseloop.engine import cut_batches, optimizers
from phaseloop.engine.accumulator import Accumulator
from phaseloop.engine.agreement import Agreement
from phaseloop.engine.checkpoint.identity import identity
from phaseloop.engine.checkpoint.weights import Weights
from phaseloop.engine.data.loaders import AnyLoader, make_loader
from phaseloop.engine.data.source import Data
from phaseloop.engine.data.stream_reader import is_stream
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.gradients import clear
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.model_options import ModelOptions, compile_in_place, lay_out
from phaseloop.engine.phases import TRAIN, Phases
from phaseloop.engine.precision import Precision
from phaseloop.engine.schedules import Schedule, TorchSchedule
from phaseloop.engine.settings import Debug, Gradients, Run
from phaseloop.engine.sharing import check_lengths

if TYPE_CHECKING:
    from phaseloop.engine.stages import Stage
    from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


def check(task: Task) -> None:
    """Raises ConfigError or DataError for what is wrong with a task by itself."""
    _check_types(task)
    task.debug.check()
    for number, stage in enumerate(task.whole_phases):
        stage.check(stage.key(number) if len(task.whole_phases) > 1 else "phases")
    for settings in optimizers.all_clipping(task.gradients):
        settings.check()
    task.run.check(others=[] if task.weights is None else [task.weights.path])
    task.model_options.check()
    task.model_options.check_model(task.bare_model)
    task.backend.check(task)
    if task.weights is not None:
        task.weights.check()
    if TRAIN in task.test_data:
        raise ConfigError("data.test", f"no test set may be called {TRAIN!r}")
    trained = training_data(task)
    if not trained and not task.test_data:
        raise ConfigError("data", "there is neither training nor test data")
    for key, data in all_data(task).items():
        data.open(task.seed, key)
        data.check(key, train=key in trained)
    _check_shared(all_data(task))
    for number, stage in enumerate(task.whole_phases):
        _check_length(task, stage, stage.key(number) if len(task.whole_phases) > 1 else "phases")


def _check_shared(all_data: Mapping[str, Data]) -> None:
    """Raises ConfigError for a stream that two sets would read: each would move the other's."""
    read: dict[int, tuple[str, Data]] = {}
    for key, data in all_data.items():
        other, first = read.setdefault(id(data.first), (key, data))
        if other == key or not is_stream(data.first):
            continue
        if first is not data or key.startswith("data.test"):  # stages may have one set
            raise ConfigError(
                f"{key}.dataset",
                f"it is the very object that {other}.dataset is, and a stream can be read by one "
                f"only: give it one of its own",
            )


def _check_length(task: Task, stage: Stage, key: str) -> None:
    """Raises ConfigError for parts of an epoch, where nobody knows how long an epoch is."""
    data = task.train_data if stage.train is None else stage.train
    if data is None or not is_stream(data.first) or data.stream_length() is not None:
        return
    for name in ("epochs", "test_every_epochs"):
        value = getattr(stage, name)
        if value is not None and value != int(value):
            raise ConfigError(
                f"{key}.{name}",
                f"{value} is a part of an epoch, and how long a pass through this stream is shows "
                f"at its end: give whole epochs, or updates, or let the stream have a length",
            )


def shortened(task: Task) -> list[Stage]:
    """The stages, each of one epoch where this is a quick try."""
    if task.debug.fast is None:
        return task.whole_phases
    fields = [field.name for field in dataclasses.fields(Phases)]
    changes = {**{name: getattr(Phases(), name) for name in fields}, "epochs": 1}
    return [dataclasses.replace(stage, **changes) for stage in task.whole_phases]


def training_data(task: Task) -> dict[str, Data]:
    """Each set of training data by its place in the configuration; those of stages come last."""
    found = {} if task.train_data is None else {"data.train": task.train_data}
    for stage in task.whole_phases:
        if stage.train is not None:
            found[_key(stage)] = stage.train
    return found


def all_data(task: Task) -> dict[str, Data]:
    """Every set of samples by its place in the configuration."""
    return {**training_data(task), **_test_keys(task)}


def _key(stage: Stage) -> str:
    """Where a stage's own training data stands in the configuration."""
    return f"phases.{stage.name}.data.train" if stage.name else "data.train"


def _test_keys(task: Task) -> dict[str, Data]:
    alone = list(task.test_data) == ["test"]
    return {"data.test" if alone else f"data.test.{n}": d for n, d in task.test_data.items()}


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
        ("model", task.bare_model, nn.Module),
        *(("gradients", given, Gradients) for given in optimizers.all_clipping(task.gradients)),
        ("precision", task.precision, Precision),
        ("run", task.run, Run),
        ("debug", task.debug, Debug),
        ("model_options", task.model_options, ModelOptions),
        *((f"test data {name!r}", data, Data) for name, data in task.test_data.items()),
    ]
    if task.weights is not None:
        wanted.append(("weights", task.weights, Weights))
    for schedule in optimizers.all_schedules(task.schedules):
        if not isinstance(schedule, TorchSchedule):
            wanted.append(("schedule", schedule, Schedule))
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
        log.warning(
            "the model is in evaluation mode and is trained so; call model.train()", extra=ALIKE
        )
    task.backend.setup()
    _place_modules(task)
    task.precision.start(task.device)
    task.freezing.begin()
    optimizers.make(task)
    if task.optimizers and task.freezing.for_good():
        task.freezing.check_left(task.trainable, task.freezing.match((), "freeze"), "freeze")
    clear(task.trainable)  # what was computed before the run is no part of its first update
    task.identity = identity(task)
    lazy = task.backend.lazy
    task.accumulator = Accumulator(task.backend.world_size, task.device if lazy else None)
    task.recorder.to_host = task.backend.to_host if lazy else None
    task.agreement = Agreement(task) if task.backend.world_size > 1 else None
    _make_loaders(task)
    task.stages.enter()
    task.stages.check()
    for step, facts in task.stages.steps:
        # What it needs of the task is missed now, and not at its first call.
        if facts.check is not None:
            facts.check(task, step)
        if callable(check_step := getattr(step, "check", None)):
            check_step(task)
    _say_debug(task)


def _place_modules(task: Task) -> None:
    task.precision.prepare(task.bare_model)
    lay_out(task.bare_model, task.model_options, task.backend)
    task.model = task.backend.prepare_model(task.bare_model)
    compile_in_place(task.bare_model, task.model_options)
    if isinstance(task.criterion_module, nn.Module):
        task.precision.prepare(task.criterion_module)
        task.backend.prepare_criterion(task.criterion_module)
    for meters in task.meter_sets.values():
        meters.to(task.device)
        meters.separate = task.backend.separate if task.backend.lazy else None


def _make_loaders(task: Task) -> None:
    # Numbered among its kind: a test draws the same whether there is training data or not.
    trained: dict[int, AnyLoader] = {}
    for number, (key, data) in enumerate(training_data(task).items()):
        if id(data) not in trained:
            trained[id(data)] = _loader(task, data, key, number, train=True)
            _warn_about_batches(data, trained[id(data)], key)
    for number, ((key, data), name) in enumerate(
        zip(_test_keys(task).items(), task.test_data, strict=True)
    ):
        task.loaders[name] = _loader(task, data, key, number, train=False)
    for stage, (_, facts) in zip(task.stages.given, task.stages.steps, strict=True):
        data_of_stage = task.stages.data(stage)
        loader = None if data_of_stage is None else trained[id(data_of_stage)]
        task.stages.loaders.append(loader)
        if loader is not None and facts.one_piece:
            _check_one_piece(loader, "data.train" if stage.train is None else _key(stage))
    if task.stages.loaders[0] is not None:
        task.loaders = {TRAIN: task.stages.loaders[0], **task.loaders}
    if task.agreement is not None:
        check_lengths(task, [*trained.values(), *task.loaders.values()])
    cut_batches.warn(task)


def _loader(task: Task, data: Data, key: str, number: int, train: bool) -> AnyLoader:
    loader = make_loader(
        data,
        train=train,
        source=number,
        seed=task.seed,
        device=task.device,
        world_size=task.backend.world_size,
        rank=task.backend.rank,
        key=key,
        at_most=task.debug.overfit if train and task.debug.overfit else task.debug.fast,
        repeat=train and task.debug.overfit is not None,
        in_step=task.backend.collective_forward,
    )
    loader.place = task.backend.place
    loader.generator = task.backend
    return loader


def _warn_about_batches(data: Data, loader: AnyLoader, key: str) -> None:
    largest, smallest = max(data.sizes.values()), min(data.sizes.values())
    processes = loader.plan.world_size
    if smallest < processes:
        log.warning(
            "%s: batch_size %d is less than the %d processes: some of them have no sample of a "
            "batch, and go through the model with one that does not count",
            key,
            smallest,
            processes,
        )
    if loader.samples is not None and loader.samples < largest:
        log.warning(
            "%s: %d samples are fewer than batch_size %d: each epoch is one smaller update",
            key,
            loader.samples,
            largest,
            extra=ALIKE,
        )


def _check_one_piece(loader: AnyLoader, place: str) -> None:
    """Steps that make several optimizer steps, or call a closure, do so on a whole batch."""
    plans = list(loader.plans.values())
    pieces = max(len(plan.window(0).pieces) for plan in plans)
    if pieces > 1:
        key = "micro_batch_size" if plans[0].accumulate is None else "accumulate"
        raise ConfigError(
            f"{place}.{key}",
            f"it cuts a batch into {pieces} micro-batches, and this train step works on whole "
            f"batches only; leave it out",
        )


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
