"""Hyper-parameters: what of a configuration makes one training another, one value a name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phaseloop.engine.task import Task

# What says where and how a run is made, and not what is trained.
_NOT_OF_THE_TRAINING = (
    "imports", "allow_targets", "run", "backend", "launch", "debug", "plan", "only", "weights",
)  # fmt: skip
_NOT_OF_THE_DATA = ("workers", "prefetch", "pin_memory")


def hyper_parameters(task: Task) -> dict[str, str | float | bool]:
    """By the path of its key, ``optimizer.lr``, each value of the task's configuration.

    Left out are keys that do not shape the training, hooks that only watch, and what is null. A
    list that is no list of mappings is one value, its text. Without a configuration there is none.
    """
    config = {k: v for k, v in task.config.items() if k not in _NOT_OF_THE_TRAINING}
    hooks = config.pop("hooks", None) or {}
    config["hooks"] = {
        name: options
        for name, options in hooks.items()
        if name in task.hooks.hooks and not task.hooks.hooks[name].only_watches
    }
    return dict(_flat(config, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, str | float | bool]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            if path.startswith("data.") and key in _NOT_OF_THE_DATA:
                continue
            yield from _flat(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{path}.{item.get('name', number)}")
    elif isinstance(value, bool):
        yield path, value
    elif isinstance(value, int | float) and math.isfinite(value):
        yield path, float(value)
    elif value is not None:
        yield path, str(value)
