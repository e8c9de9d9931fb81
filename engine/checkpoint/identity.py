"""Identity: what makes a training the one it is, beside its configuration file.

A task made in Python has no file to compare, and no file says how many samples a data set has.

A fact that a version adds is left out where it says nothing new, so that checkpoints of versions
before it, which lack it, go on: absent means as it always was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from phaseloop.engine.data.augment import names_of
from phaseloop.engine.data.mix import Mix
from phaseloop.engine.data.source import Data
from phaseloop.engine.data.stream_reader import is_stream
from phaseloop.engine.facts import fact_of, fingerprint, name_of
from phaseloop.engine.settings import LossScale

if TYPE_CHECKING:
    from phaseloop.engine.stages import Stage
    from phaseloop.engine.task import Task

_PARAMETERS = ("params", "param_names")


def identity(task: Task) -> dict[str, Any]:
    """Facts, as plain Python, that fix the order of the data and the mathematics of an update.

    Taken before a resume changes the optimizers: their options are as the user gave them.
    """
    facts: dict[str, Any] = {
        "seed": task.seed,
        "precision": task.precision.name,
        "gradients": {n: dataclasses.asdict(given) for n, given in task.clipping.items()},
        "every": dict(task.every),
        "optimizers": {name: _options(optimizer) for name, optimizer in task.optimizers.items()},
        **task.model_options.facts(),
    }
    if task.precision.name == "float16":
        facts["loss_scale"] = dataclasses.asdict(task.precision.loss_scale or LossScale())
    if task.freezing.for_good():
        facts["freeze"] = task.freezing.for_good()
    data = task.train_data
    if data is not None:
        facts["data"] = facts_of_data(data)
    facts["train_step"] = [step.name for _, step in task.stages.steps]
    facts["schedule"] = _schedules(task, task.schedules)
    if task.stages.several:
        facts["stages"] = [_stage(task, stage) for stage in task.whole_phases]
    if task.debug.overfit is not None:
        facts["debug"] = {"overfit": task.debug.overfit}
    return facts


def _stage(task: Task, stage: Stage) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": stage.name, "repeat": stage.repeat}
    facts["freeze"] = list(stage.freeze)
    if stage.train is not None:
        facts["data"] = facts_of_data(stage.train)
    if stage.schedule is not None:
        facts["schedule"] = _schedules(task, stage.schedule)
    return facts


def _schedules(task: Task, given: Any) -> dict[str, Any]:
    """By optimizer, and each by its number among those of it."""
    facts = {}
    for name in task.optimizers:
        own = given.get(name, ()) if isinstance(given, Mapping) else given
        listed = own if isinstance(own, Sequence) else [own]
        facts[name] = {str(number): schedule.facts() for number, schedule in enumerate(listed)}
    return facts


def facts_of_data(data: Data) -> dict[str, Any]:
    """What fixes the order and the batches of a set of samples."""
    return {
        "samples": data.stream_length() if is_stream(data.first) else len(data.first),
        "batch_size": data.batch_size if isinstance(data.batch_size, int) else data.sizes,
        "shuffle": data.shuffled,
        "drop_last": data.drop_last,
        **_draws(data),
    }


def _draws(data: Data) -> dict[str, Any]:
    """Which samples are drawn and what is made of them, where anything is said about it."""
    given = {
        "mix": data.first.facts() if isinstance(data.first, Mix) else None,
        "sampler": data.sampler.facts() if data.sampler is not None else None,
        "limit": data.limit,
        "batch_transform": name_of(data.batch_transform),
        "augment": names_of(data.augment) or None,
        "views": data.views if data.views > 1 else None,
        "rebuild_every": data.rebuild_every,
        "fingerprint": fingerprint(data.first),
    }
    return {name: value for name, value in given.items() if value is not None}


def _options(optimizer: Optimizer) -> dict[str, Any]:
    groups = {
        f"group {number}": {k: fact_of(v) for k, v in group.items() if k not in _PARAMETERS}
        for number, group in enumerate(optimizer.param_groups)
    }
    return {"class": type(optimizer).__name__, **groups}
