"""Identity: what makes a training the one it is, beside its configuration file.

A task made in Python has no file to compare, and no file says how many samples a data set has.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

_PLAIN = (bool, int, float, str, type(None))


def identity(task: Task) -> dict[str, Any]:
    """Facts, as plain Python, that fix the order of the data and the mathematics of an update.

    Taken before a resume changes the optimizers: their options are as the user gave them.
    """
    facts: dict[str, Any] = {
        "seed": task.seed,
        "precision": task.precision.name,
        "gradients": dataclasses.asdict(task.gradients),
        "optimizers": {name: _options(optimizer) for name, optimizer in task.optimizers.items()},
    }
    if task.freezing.for_good():
        facts["freeze"] = task.freezing.for_good()
    data = task.train_data
    if data is not None:
        facts["data"] = {
            "samples": len(data.dataset),
            "batch_size": data.batch_size,
            "shuffle": data.shuffle,
            "drop_last": data.drop_last,
        }
    return facts


def _options(optimizer: Optimizer) -> dict[str, Any]:
    groups = {
        f"group {number}": {k: v for k, v in group.items() if isinstance(v, _PLAIN)}
        for number, group in enumerate(optimizer.param_groups)
    }
    return {"class": type(optimizer).__name__, **groups}
