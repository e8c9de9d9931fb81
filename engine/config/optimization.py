"""The optimizer and its schedules from their parts of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from phaseloop.engine import registry
from phaseloop.engine.config.components import Components
from phaseloop.engine.config.schema import Component
from phaseloop.engine.config.typed import convert, to_dataclass
from phaseloop.engine.errors import ConfigError, listing, nearest
from phaseloop.engine.group_rules import GroupRules, parameter_groups
from phaseloop.engine.schedules import ScaleWithBatch, Schedule, TorchSchedule, Warmup
from phaseloop.engine.schedules.schedule import keyed

Schedules = list[Schedule | TorchSchedule]

_OURS = {
    "option": str | None,
    "warmup": Warmup | None,
    "interval": str | None,
    "groups": list[str] | None,
    "scale_with_batch": ScaleWithBatch | None,
}
_TORCHS = {
    "interval": str | None,
    "frequency": int | None,
    "metric": str | None,
    "strict": bool | None,
    "scale_with_batch": ScaleWithBatch | None,
}


def check_optimizer(
    spec: Component, components: Components, key: str = "optimizer", extra: Sequence[str] = ()
) -> None:
    """Raises ConfigError for what is wrong with an optimizer's options or group rules.

    Args:
        extra: further options that the engine takes for itself.
    """
    _group_rules(spec, key)
    components.check(spec, registry.optimizers, key, given=1, extra=("groups", *extra))


def make_optimizer(
    spec: Component,
    components: Components,
    criterion: Any,
    key: str = "optimizer",
    only: Collection[str] | None = None,
) -> Callable[[nn.Module], Optimizer]:
    """A function of the model; a criterion with parameters of its own is trained with it.

    Args:
        only: names of the parameters that it moves; None: all.

    Raises:
        ConfigError: by the function: a rule that fits no parameter, an option out of range.
    """
    rules = _group_rules(spec, key)
    extra = criterion if isinstance(criterion, nn.Module) else None

    def make(model: nn.Module) -> Optimizer:
        parameters: list[Any]
        if rules is None:
            parameters = [p for n, p in _named(model, extra) if only is None or n in only]
        else:
            options = _options(spec, components, key)
            parameters = parameter_groups(
                model, options, rules, criterion=extra, only=only, key=f"{key}.groups"
            )
        try:
            made = components.make(spec, registry.optimizers, key, parameters, extra=("groups",))
        except TypeError as error:  # what torch raises for betas that are one number, say
            raise ConfigError(key, str(error)) from error
        if not isinstance(made, Optimizer):
            raise ConfigError(key, f"{type(made).__name__} is not a torch optimizer")
        return made

    return make


def _named(model: nn.Module, criterion: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    yield from model.named_parameters()
    if criterion is not None:
        for name, parameter in criterion.named_parameters():
            yield f"criterion.{name}", parameter


def make_schedules(
    spec: Component | None,
    components: Components,
    optimizer: Component | None,
    key: str = "schedule",
) -> Schedules:
    """The schedules of one optimizer.

    Args:
        spec: a component, or a mapping from option to component.
        optimizer: the optimizer's part of the configuration, whose options may be scheduled.

    Raises:
        ConfigError: a component that there is not, or that does not take what it is given.
    """
    made: Schedules = []
    for place, entry, option in _entries(spec, key):
        with keyed(place):
            target = components.target(entry, registry.schedules, place, None)
            if isinstance(target, type) and issubclass(target, LRScheduler):
                made.append(_torch_schedule(entry, components, place, option))
            else:
                made.append(_schedule(entry, components, place, option))
    if optimizer is not None:
        known = _options(optimizer, components, "optimizer")
        for schedule in made:
            if isinstance(schedule, Schedule):
                _check_option(schedule, known)
    return made


def _entries(spec: Component | None, key: str) -> Iterator[tuple[str, Component, str]]:
    """Place, component and option of each schedule; by default the key is the option."""
    if spec is None:
        return
    several = spec and not {"name", "_target_", *_OURS, *_TORCHS} & set(spec)
    if several and all(entry is None or isinstance(entry, Mapping) for entry in spec.values()):
        for name, entry in spec.items():
            if entry is not None:
                yield f"{key}.{name}", entry, name
    else:
        yield key, spec, "lr"


def _schedule(spec: Component, components: Components, key: str, option: str) -> Schedule:
    curve = components.make(spec, registry.schedules, key, extra=tuple(_OURS))
    given = {"option": option, **_taken(spec, _OURS, key)}
    return Schedule(curve, **given, key=key)


def _torch_schedule(
    spec: Component, components: Components, key: str, option: str
) -> TorchSchedule:
    for name in ("warmup", "groups", "option"):
        if name in spec:
            raise ConfigError(
                f"{key}.{name}",
                f"does not go with a scheduler of torch's; it is for schedules by name: "
                f"{listing(entry.name for entry in registry.schedules)}",
            )
    if option != "lr":
        raise ConfigError(key, "a scheduler of torch's is for the option lr")
    _make_scheduler(spec, components, key, None)

    def make(optimizer: Optimizer) -> LRScheduler:
        made: LRScheduler = _make_scheduler(spec, components, key, optimizer)
        return made

    schedule = TorchSchedule(make, **_taken(spec, _TORCHS, key), key=key)
    schedule.check_kind(components.target(spec, registry.schedules, key, None))
    return schedule


def _make_scheduler(
    spec: Component, components: Components, key: str, optimizer: Optimizer | None
) -> Any:
    """Torch's scheduler and those inside it; without an optimizer they are only checked."""
    options = {name: value for name, value in spec.items() if name not in _TORCHS}
    if isinstance(inner := spec.get("schedulers"), list):  # of SequentialLR, ChainedScheduler
        options["schedulers"] = [
            _make_scheduler(one, components, f"{key}.schedulers.{number}", optimizer)
            for number, one in enumerate(inner)
        ]
    target = components.target(options, registry.schedules, key, None)
    first = next(iter(inspect.signature(target).parameters), None)
    if optimizer is None:
        given = int(first == "optimizer")
        components.check(options, registry.schedules, key, given)
        return None
    arguments = [optimizer] if first == "optimizer" else []
    return components.make(options, registry.schedules, key, *arguments)


def _taken(spec: Component, kinds: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The engine's own options of a schedule, in their types; null is as good as left out."""
    given = {
        name: convert(kind, spec[name], f"{key}.{name}")
        for name, kind in kinds.items()
        if name in spec
    }
    return {name: value for name, value in given.items() if value is not None}


def _check_option(schedule: Schedule, known: Mapping[str, Any]) -> None:
    option = schedule.option
    if not known or option in known or (option == "momentum" and "betas" in known):
        return
    names = [name for name, value in known.items() if isinstance(value, (int, float))]
    raise ConfigError(
        f"{schedule.key}.option",
        f"the optimizer has no option {option!r}.{nearest(option, names)} It has: {listing(names)}",
    )


def _options(spec: Component, components: Components, key: str) -> dict[str, Any]:
    """An optimizer's options: its defaults, and over them what the configuration says.

    Empty where it takes any, so that they are not known.
    """
    target = components.target(spec, registry.optimizers, key, None)
    parameters = list(inspect.signature(target).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {}
    defaults = {p.name: p.default for p in parameters}
    given = {k: v for k, v in spec.items() if k not in ("name", "_target_", "groups")}
    return {**defaults, **given}


def _group_rules(spec: Component, key: str) -> GroupRules | None:
    if spec.get("groups") is None:
        return None
    rules = to_dataclass(GroupRules, spec["groups"], f"{key}.groups")
    rules.check(f"{key}.groups")
    return rules
