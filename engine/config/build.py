"""Building: from a checked configuration to a task and its hooks.

Everything is checked before the first data set is opened.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from phaseloop.engine import (
    builtin,  # noqa: F401 registers torch's own optimizers and losses
    registry,
)
from phaseloop.engine.backends import Backend
from phaseloop.engine.config.components import Components
from phaseloop.engine.config.schema import Component, Schema, TestSet
from phaseloop.engine.config.typed import to_dataclass
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.schedules import Schedule, Warmup
from phaseloop.engine.task import Task

_SCHEDULE_KEYS = ("option", "warmup", "interval")


@dataclass
class Built:
    """What a configuration makes."""

    task: Task
    hooks: dict[str, Hook]


def build(schema: Schema) -> Built:
    """Make the task and the hooks.

    Args:
        schema: the configuration, checked.

    Raises:
        ConfigError: a component is unknown, or does not take what it is given.
        DataError: a data set cannot be used.
    """
    components = Components(schema.imports, schema.allow_targets)
    _check(schema, components)
    hooks = make_hooks(schema, components)
    backend = components.make(schema.backend, registry.backends, "backend")
    _seed(schema.seed)
    train = _data(schema.data.train, components, "data.train")
    test = _data(schema.data.test, components, "data.test")
    model = components.make(schema.model, registry.models, "model")
    if not isinstance(model, nn.Module):
        raise ConfigError("model", f"{type(model).__name__} is not a torch.nn.Module")
    criterion = _optional(components, schema.criterion, registry.criteria, "criterion")
    task = Task(
        model=model,
        phases=schema.phases,
        criterion=criterion,
        optimizer=_optimizer(schema, components, criterion),
        train=train,
        test=test,
        schedule=_schedule(schema, components),
        train_meters=_meters(schema.meters.train, components, "meters.train"),
        test_meters=_meters(schema.meters.test, components, "meters.test"),
        train_step=_train_step(schema, components),
        gradients=schema.gradients,
        freeze=schema.freeze,
        precision=schema.precision,
        backend=_backend(backend),
        seed=schema.seed,
        run=schema.run,
        config=dataclasses.asdict(schema),
    )
    return Built(task, hooks)


def make_hooks(schema: Schema, components: Components) -> dict[str, Hook]:
    """The hooks of the mapping, but for those switched off with null."""
    return {
        name: components.make(spec, registry.hooks, f"hooks.{name}", default_name=name)
        for name, spec in schema.hooks.items()
        if spec is not None
    }


def _check(schema: Schema, components: Components) -> None:
    """Names and options of every component, before any of them is made."""
    for name, spec in schema.hooks.items():
        if spec is not None:
            components.check(spec, registry.hooks, f"hooks.{name}", default_name=name)
    for kind, meters in {"train": schema.meters.train, "test": schema.meters.test}.items():
        for name, spec in meters.items():
            if spec is not None:
                key = f"meters.{kind}.{name}"
                components.check(spec, registry.meters, key, default_name=name)
    components.check(schema.backend, registry.backends, "backend")
    components.check(schema.model, registry.models, "model")
    if schema.criterion is not None:
        components.check(schema.criterion, registry.criteria, "criterion")
    if schema.optimizer is not None:
        components.check(schema.optimizer, registry.optimizers, "optimizer", given=1)
    elif schema.data.train is not None and schema.only is None:
        raise ConfigError("optimizer", "training needs one, e.g. optimizer=sgd")
    _schedule(schema, components)
    _train_step(schema, components)
    for key, data in {"data.train": schema.data.train, "data.test": schema.data.test}.items():
        if data is not None:
            components.check(data.dataset, registry.datasets, f"{key}.dataset")
            _collate(data.collate, components, f"{key}.collate")


def _seed(seed: int) -> None:
    """For building data and model; the training's own generators start in ``Task.seed_all``."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _data(data: TestSet | None, components: Components, key: str) -> Data | None:
    if data is None:
        return None
    options = {f.name: getattr(data, f.name) for f in dataclasses.fields(data)}
    options["dataset"] = components.make(data.dataset, registry.datasets, f"{key}.dataset")
    options["collate"] = _collate(data.collate, components, f"{key}.collate")
    return Data(**options)


def _collate(
    spec: Component | None, components: Components, key: str
) -> Callable[[list[Any]], Any] | None:
    """The function itself, its options filled in; its first argument is the list of samples."""
    if spec is None:
        return None
    components.check(spec, registry.collates, key, given=1)
    options = {name: value for name, value in spec.items() if name not in ("name", "_target_")}
    return functools.partial(components.target(spec, registry.collates, key, None), **options)


def _optional(components: Components, spec: Any, kind: registry.Registry, key: str) -> Any:
    return None if spec is None else components.make(spec, kind, key)


def _optimizer(
    schema: Schema, components: Components, criterion: Any
) -> Callable[[nn.Module], Optimizer] | None:
    """A function of the model; a criterion with parameters of its own is trained with it."""
    if schema.optimizer is None:
        return None
    spec = schema.optimizer
    extra = list(criterion.parameters()) if isinstance(criterion, nn.Module) else []

    def make(model: nn.Module) -> Optimizer:
        parameters = [*model.parameters(), *extra]
        made = components.make(spec, registry.optimizers, "optimizer", parameters)
        if not isinstance(made, Optimizer):
            raise ConfigError("optimizer", f"{type(made).__name__} is not a torch optimizer")
        return made

    return make


def _schedule(schema: Schema, components: Components) -> list[Schedule]:
    spec = schema.schedule
    if spec is None:
        return []
    curve = components.make(spec, registry.schedules, "schedule", extra=_SCHEDULE_KEYS)
    warmup = spec.get("warmup")
    return [
        Schedule(
            curve,
            option=spec.get("option", "lr"),
            warmup=None if warmup is None else to_dataclass(Warmup, warmup, "schedule.warmup"),
            interval=spec.get("interval", "update"),
        )
    ]


def _meters(
    specs: Mapping[str, Component | None], components: Components, key: str
) -> dict[str, Any]:
    return {
        name: components.make(spec, registry.meters, f"{key}.{name}", default_name=name)
        for name, spec in specs.items()
        if spec is not None
    }


def _train_step(schema: Schema, components: Components) -> str | Callable[[Any], None]:
    """A registered function by name; a class is made with its options."""
    spec = schema.train_step
    if isinstance(spec, str):
        spec = {"name": spec}
    target = components.target(spec, registry.train_steps, "train_step", None)
    if isinstance(target, type):
        made: Callable[[Any], None] = components.make(spec, registry.train_steps, "train_step")
        return made
    if options := sorted(set(spec) - {"name", "_target_"}):
        raise ConfigError(
            f"train_step.{options[0]}", f"{target.__name__} is a function and takes no options"
        )
    return target  # type: ignore[no-any-return]


def _backend(made: Any) -> Backend:
    if not isinstance(made, Backend):
        raise ConfigError("backend", f"{type(made).__name__} is not a phaseloop Backend")
    return made
