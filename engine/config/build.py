"""Building: from a checked configuration to a task and its hooks.

Everything is checked before the first data set is opened.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from phaseloop.engine import (
    builtin,  # noqa: F401 registers torch's own optimizers and losses
    registry,
)
from phaseloop.engine.backends import Backend
from phaseloop.engine.checkpoint.weights import Weights
from phaseloop.engine.config import data as sets_of
from phaseloop.engine.config.components import Components
from phaseloop.engine.config.defaults import defaults
from phaseloop.engine.config.optimization import check_optimizer, make_optimizer, make_schedules
from phaseloop.engine.config.processes import ALONE, AUTO, SEVERAL, resolved
from phaseloop.engine.config.schema import Component, Schema, StageSpec
from phaseloop.engine.config.several import check_several, make_several, make_stage_schedules
from phaseloop.engine.config.typed import convert, to_dataclass
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import Hook
from phaseloop.engine.model_options import ModelOptions
from phaseloop.engine.phases import Phases
from phaseloop.engine.precision import Precision
from phaseloop.engine.stages import Stage
from phaseloop.engine.starting import KEYS as STARTING_KEYS
from phaseloop.engine.task import Task
from phaseloop.engine.urls import without_secrets

_OPTION_KEYS = tuple(f.name for f in dataclasses.fields(ModelOptions))
_MODEL_KEYS = (*_OPTION_KEYS, "weights")


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
    backend = components.make(_backend_spec(schema, components), registry.backends, "backend")
    _seed(schema.seed)
    sets = {key: sets_of.make(spec, components, key) for key, spec in schema.data.by_key.items()}
    train = sets.pop("data.train", None)
    test = dict(zip(schema.data.tests, sets.values(), strict=True))
    model = components.make(schema.model, registry.models, "model", extra=_MODEL_KEYS)
    if not isinstance(model, nn.Module):
        raise ConfigError("model", f"{type(model).__name__} is not a torch.nn.Module")
    criterion = _optional(components, schema.criterion, registry.criteria, "criterion")
    task = Task(
        model=model,
        phases=_phases(schema, components),
        criterion=criterion,
        **_optimizers(schema, components, criterion),
        train=train,
        test=test,
        train_meters=_meters(schema.meters.get("train"), components, "meters.train"),
        test_meters=_test_meters(schema, components),
        train_step=_train_step(schema.train_step, components, "train_step"),
        freeze=schema.freeze,
        precision=_precision(schema),
        model_options=_model_options(schema),
        weights=_weights(schema),
        backend=_backend(backend),
        seed=schema.seed,
        run=schema.run,
        debug=schema.debug,
        config=_to_keep(schema),
    )
    task.config_defaults = defaults(schema)
    return Built(task, hooks)


def _to_keep(schema: Schema) -> dict[str, Any]:
    """The configuration as every checkpoint and ``resolved.yaml`` have it: no secrets in it."""
    config = dataclasses.asdict(schema)
    config["run"]["storage_options"] = without_secrets(schema.run.storage_options)
    return config


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
    for kind, meters in schema.meters.items():
        for name, spec in (meters or {}).items():
            if spec is not None:
                key = f"meters.{kind}.{name}"
                components.check(spec, registry.meters, key, default_name=name)
    # With the keys of whoever starts processes, so that a wrong one is told the nearest of them.
    spec = _backend_spec(schema, components)
    components.check(spec, registry.backends, "backend", extra=STARTING_KEYS)
    _check_model(schema, components)
    if schema.criterion is not None:
        components.check(schema.criterion, registry.criteria, "criterion")
    check_several(schema.optimizers, components)
    if schema.optimizer is not None:
        check_optimizer(schema.optimizer, components)
    elif schema.train_sets and schema.only is None and not any(schema.optimizers.values()):
        raise ConfigError("optimizer", "training needs one, e.g. optimizer=sgd")
    make_schedules(schema.schedule, components, schema.optimizer)
    _train_step(schema.train_step, components, "train_step")
    for key, stage in schema.stages.items():
        _stage_schedule(schema, stage, components, f"{key}.schedule")
        if stage.train_step is not None:
            _train_step(stage.train_step, components, f"{key}.train_step")
    for key, data in {**schema.data.by_key, **schema.train_sets}.items():
        sets_of.check(data, components, key)


def _seed(seed: int) -> None:
    """For building data and model; the training's own generators start in ``Task.seed_all``."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _phases(schema: Schema, components: Components) -> Phases | list[Stage]:
    if isinstance(schema.phases, Phases):
        return schema.phases
    return [_stage(schema, stage, components, key) for key, stage in schema.stages.items()]


def _stage(schema: Schema, spec: StageSpec, components: Components, key: str) -> Stage:
    lengths = {f.name: getattr(spec, f.name) for f in dataclasses.fields(Phases)}
    train = None if spec.data is None else spec.data.train
    step = spec.train_step
    return Stage(
        **lengths,
        name=spec.name,
        repeat=spec.repeat,
        train=None if train is None else sets_of.make(train, components, f"{key}.data.train"),
        test_sets=spec.test_sets,
        train_step=None if step is None else _train_step(step, components, f"{key}.train_step"),
        schedule=_stage_schedule(schema, spec, components, f"{key}.schedule"),
        freeze=spec.freeze,
    )


def _stage_schedule(schema: Schema, spec: StageSpec, components: Components, key: str) -> Any:
    if spec.schedule is None:
        return None
    if any(schema.optimizers.values()):
        return make_stage_schedules(schema.optimizers, components, spec.schedule, key)
    return make_schedules(spec.schedule, components, schema.optimizer, key)


def _optimizers(schema: Schema, components: Components, criterion: Any) -> dict[str, Any]:
    """What the task is given for one optimizer, or for several."""
    if any(schema.optimizers.values()):
        several = make_several(
            schema.optimizers, components, criterion, schema.schedule, schema.gradients
        )
        return {
            "optimizer": several.make,
            "every": several.every,
            "schedule": several.schedule,
            "gradients": several.gradients,
        }
    spec = schema.optimizer
    return {
        "optimizer": None if spec is None else make_optimizer(spec, components, criterion),
        "schedule": make_schedules(schema.schedule, components, spec),
        "gradients": schema.gradients,
    }


def _precision(schema: Schema) -> str | Precision:
    given = schema.precision
    return given if isinstance(given, str) else Precision(given.name, given.loss_scale)


def _optional(components: Components, spec: Any, kind: registry.Registry, key: str) -> Any:
    return None if spec is None else components.make(spec, kind, key)


def _meters(
    specs: Mapping[str, Component | None] | None, components: Components, key: str
) -> dict[str, Any]:
    return {
        name: components.make(spec, registry.meters, f"{key}.{name}", default_name=name)
        for name, spec in (specs or {}).items()
        if spec is not None
    }


def _test_meters(schema: Schema, components: Components) -> dict[str, Any]:
    """Those of every test set, and under the name of a set its own in place of them."""
    own = {
        name: _meters(schema.meters[name], components, f"meters.{name}")
        for name in schema.data.tests
        if name in schema.meters and name != "test"
    }
    return {**_meters(schema.meters.get("test"), components, "meters.test"), **own}


def _check_model(schema: Schema, components: Components) -> None:
    spec = schema.model
    components.check(spec, registry.models, "model", extra=_MODEL_KEYS)
    own = components.options(spec, registry.models, "model")
    if clash := [key for key in _MODEL_KEYS if key in spec and key in own]:
        raise ConfigError(
            f"model.{clash[0]}",
            "the engine takes this key, and the model has an option of that name, too: register "
            "a function that makes the model and has another name for it",
        )
    _model_options(schema).check()
    if (weights := _weights(schema)) is not None:
        weights.check()


def _model_options(schema: Schema) -> ModelOptions:
    given = {key: schema.model[key] for key in _OPTION_KEYS if key in schema.model}
    return to_dataclass(ModelOptions, given, "model")


def _weights(schema: Schema) -> Weights | None:
    given = convert(str | Weights | None, schema.model.get("weights"), "model.weights")
    return Weights(given) if isinstance(given, str) else given


def _train_step(
    spec: Component | str, components: Components, key: str
) -> str | Callable[[Any], None]:
    """A registered function by name; a class is made with its options."""
    if isinstance(spec, str):
        spec = {"name": spec}
    target = components.target(spec, registry.train_steps, key, None)
    if isinstance(target, type):
        made: Callable[[Any], None] = components.make(spec, registry.train_steps, key)
        return made
    if options := sorted(set(spec) - {"name", "_target_"}):
        raise ConfigError(
            f"{key}.{options[0]}", f"{target.__name__} is a function and takes no options"
        )
    return target  # type: ignore[no-any-return]


def _backend_spec(schema: Schema, components: Components) -> Component:
    """What ``backend`` means here; with ``auto`` one file does for one process and for many.

    Alone, what says how several work together is checked, and not used.
    """
    spec = resolved(schema.backend)
    if schema.backend.get("name") != AUTO or spec["name"] != ALONE:
        return spec
    several = {**spec, "name": SEVERAL}
    components.check(several, registry.backends, "backend", extra=STARTING_KEYS)
    own = ["name", *components.options(spec, registry.backends, "backend")]
    return {key: value for key, value in spec.items() if key in own}


def _backend(made: Any) -> Backend:
    if not isinstance(made, Backend):
        raise ConfigError("backend", f"{type(made).__name__} is not a phaseloop Backend")
    return made
