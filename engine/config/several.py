"""Several optimizers by name, from the key ``optimizers``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phaseloop.engine.config.components import Components
from phaseloop.engine.config.optimization import (
    Schedules,
    check_optimizer,
    make_optimizer,
    make_schedules,
)
from phaseloop.engine.config.schema import Component
from phaseloop.engine.config.typed import convert
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.freezing import Freezing
from phaseloop.engine.settings import Gradients

log = logging.getLogger("phaseloop")

_OURS: dict[str, Any] = {
    "parameters": str | list[str],
    "every": int,
    "schedule": dict[str, Any] | None,
    "gradients": Gradients | None,
}


@dataclass
class Several:
    """What a task is given for several optimizers.

    Attributes:
        make: makes them for a model.
        every, schedule, gradients: by name, as :class:`~phaseloop.engine.task.Task` takes them.
    """

    make: Callable[[nn.Module], dict[str, Optimizer]]
    every: dict[str, int] = field(default_factory=dict)
    schedule: dict[str, Schedules] = field(default_factory=dict)
    gradients: dict[str, Gradients] = field(default_factory=dict)


def check_several(specs: Mapping[str, Component | None], components: Components) -> None:
    """Raises ConfigError for what is wrong with the optimizers by themselves."""
    for name, spec in _there(specs).items():
        key = f"optimizers.{name}"
        own = _own(spec, key)
        if not own.get("parameters"):
            raise ConfigError(
                f"{key}.parameters", "say which it moves: a pattern of names, or a list of them"
            )
        check_optimizer(spec, components, key, extra=tuple(_OURS))
        if own.get("gradients") is not None:
            own["gradients"].check(f"{key}.gradients")
        make_schedules(own.get("schedule"), components, _rest(spec), f"{key}.schedule")


def make_several(
    specs: Mapping[str, Component | None],
    components: Components,
    criterion: Any,
    schedule: Component | None,
    gradients: Gradients,
) -> Several:
    """The optimizers, and what each has of its own.

    Args:
        schedule, gradients: of those that have none of their own.

    Raises:
        ConfigError: by ``make``: a pattern that matches nothing, or a parameter of two optimizers.
    """
    extra = criterion if isinstance(criterion, nn.Module) else None
    there = _there(specs)
    own = {name: _own(spec, f"optimizers.{name}") for name, spec in there.items()}

    def make(model: nn.Module) -> dict[str, Optimizer]:
        modules = {"": model, **({} if extra is None else {"criterion": extra})}
        taken = _parameters(modules, {name: given["parameters"] for name, given in own.items()})
        return {
            name: make_optimizer(
                _rest(spec), components, criterion, f"optimizers.{name}", only=taken[name]
            )(model)
            for name, spec in there.items()
        }

    made = Several(make)
    for name, given in own.items():
        made.every[name] = given.get("every", 1)
        made.gradients[name] = given.get("gradients") or gradients
        place, spec = f"optimizers.{name}.schedule", given.get("schedule")
        if spec is None:
            place, spec = "schedule", schedule
        made.schedule[name] = make_schedules(spec, components, _rest(there[name]), place)
    return made


def make_stage_schedules(
    specs: Mapping[str, Component | None], components: Components, given: Component, key: str
) -> dict[str, Schedules]:
    """A stage's schedules: for all optimizers, or by the name of each.

    Args:
        given: a component, a mapping from option to component, or one from an optimizer's name
            to these; an optimizer that is not in it keeps its options as they were given.
    """
    there = _there(specs)
    by_name = bool(given) and set(given) <= set(there)
    return {
        name: make_schedules(
            given.get(name) if by_name else given,
            components,
            _rest(spec),
            f"{key}.{name}" if by_name else key,
        )
        for name, spec in there.items()
    }


def _there(specs: Mapping[str, Component | None]) -> dict[str, Component]:
    return {name: spec for name, spec in specs.items() if spec is not None}


def _own(spec: Component, key: str) -> dict[str, Any]:
    """What the engine takes for itself, in its types."""
    return {
        name: convert(kind, spec[name], f"{key}.{name}")
        for name, kind in _OURS.items()
        if name in spec
    }


def _rest(spec: Component) -> Component:
    return {name: value for name, value in spec.items() if name not in _OURS}


def _parameters(
    modules: Mapping[str, nn.Module], patterns: Mapping[str, str | list[str]]
) -> dict[str, frozenset[str]]:
    """Names of the parameters of each optimizer."""
    names = Freezing(modules)
    taken: dict[str, frozenset[str]] = {}
    for name, given in patterns.items():
        key = f"optimizers.{name}.parameters"
        found = names.match([given] if isinstance(given, str) else given, key).parameters
        for other, theirs in taken.items():
            if both := sorted(found & theirs):
                raise ConfigError(key, f"optimizers.{other} moves {both[0]} already")
        taken[name] = found
    moved = frozenset[str]().union(*taken.values())
    left = [
        name
        for prefix, module in modules.items()
        for short, parameter in module.named_parameters()
        if (name := f"{prefix}.{short}" if prefix else short) not in moved
        and parameter.requires_grad
    ]
    if left:
        log.warning("no optimizer moves %s", ", ".join(left))
    return taken
