"""Data: the sets of samples that a configuration describes, checked and made."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from phaseloop.engine import registry
from phaseloop.engine.config.components import Components
from phaseloop.engine.config.schema import Component, MixSource, TestSet, TrainSet
from phaseloop.engine.data import (  # noqa: F401 registers ours
    augmentations,
    batch_transforms,
    colours,
)
from phaseloop.engine.data.mix import Mix, Source
from phaseloop.engine.data.places import placed
from phaseloop.engine.data.samplers import Sampler
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import ConfigError

_OF_THE_SAMPLER = ("by",)
_IN_MIX = ("mix", "epoch_samples")


def check(spec: TrainSet | TestSet, components: Components, key: str) -> None:
    """Names and options of every component of one set, before any of them is made.

    Raises:
        ConfigError: a component is unknown, or does not take what it is given.
    """
    for place, dataset in _datasets(spec, key).items():
        components.check(_for_epoch(dataset, components, place, 1, spec), registry.datasets, place)
    _calls(spec, components, key)
    _augmentations(spec, components, key)
    _sampler(spec, components, key)


def make(spec: TrainSet | TestSet, components: Components, key: str) -> Data:
    """One set of samples.

    Raises:
        ConfigError: as for :func:`check`.
        DataError: a dataset cannot be used.
    """
    options = {
        f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name not in _IN_MIX
    }
    options.update(_calls(spec, components, key))
    if isinstance(spec, TrainSet):
        options["sampler"] = _sampler(spec, components, key)
        options["augment"] = _augmentations(spec, components, key)
    rebuilds = getattr(spec, "rebuild_every", None) is not None
    open_dataset = functools.partial(_open, spec, components, key)
    options["dataset"] = open_dataset if rebuilds else open_dataset(epoch=1)
    return Data(**options)


def _open(spec: TrainSet | TestSet, components: Components, key: str, *, epoch: int) -> Any:
    """The dataset, or the mix, as made for ``epoch``."""
    made = {
        place: components.make(
            _for_epoch(dataset, components, place, epoch, spec), registry.datasets, place
        )
        for place, dataset in _datasets(spec, key).items()
    }
    if not isinstance(spec, TrainSet) or spec.mix is None:
        return made[f"{key}.dataset"]
    sources = {
        name: Source(made[f"{key}.mix.{name}.dataset"], source.weight, source.limit)
        for name, source in _sources(spec).items()
    }
    return Mix(sources, spec.epoch_samples, f"{key}.mix")


def _datasets(spec: TrainSet | TestSet, key: str) -> dict[str, Component]:
    """Every dataset of the set by its place."""
    if isinstance(spec, TrainSet) and spec.mix is not None:
        return {f"{key}.mix.{name}.dataset": s.dataset for name, s in _sources(spec).items()}
    assert spec.dataset is not None  # the schema has seen to it
    return {f"{key}.dataset": spec.dataset}


def _sources(spec: TrainSet) -> dict[str, MixSource]:
    return {name: source for name, source in (spec.mix or {}).items() if source is not None}


def _for_epoch(
    dataset: Component, components: Components, key: str, epoch: int, spec: TrainSet | TestSet
) -> Component:
    """The component with its ``epoch``, where it is made again and takes one."""
    if getattr(spec, "rebuild_every", None) is None or "epoch" in dataset:
        return dataset
    target = components.target(dataset, registry.datasets, key, None)
    takes = "epoch" in inspect.signature(target).parameters
    return {**dataset, "epoch": epoch} if takes else dataset


def _calls(spec: TrainSet | TestSet, components: Components, key: str) -> dict[str, Any]:
    """The options that are called, each with this many arguments of the engine's."""
    kinds = {
        "collate": (registry.collates, 1),
        "batch_transform": (registry.batch_transforms, 1),
        "to_device": (registry.transfers, 2),
    }
    return {
        name: _callable(getattr(spec, name), components, kind, key, name, given)
        for name, (kind, given) in kinds.items()
        if hasattr(spec, name)
    }


def _augmentations(
    spec: TrainSet | TestSet, components: Components, key: str
) -> dict[str, Callable[..., Any] | None] | None:
    """By name, in their order; None: there are none."""
    given = spec.augment if isinstance(spec, TrainSet) else {}
    made = {
        name: _callable(one, components, registry.augmentations, key, f"augment.{name}", 2, name)
        for name, one in given.items()
    }
    return made or None


def _callable(
    spec: Component | None,
    components: Components,
    kind: registry.Registry,
    home: str,
    within: str,
    given: int,
    name: str | None = None,
) -> Callable[..., Any] | None:
    """A function with its options filled in, or the object of a class made with them.

    Args:
        home, within: where the set stands, and where in it the component does.
    """
    if spec is None:
        return None
    key = f"{home}.{within}"
    target = components.target(spec, kind, key, name)
    if isinstance(target, type):
        try:
            made: Callable[..., Any] = components.make(spec, kind, key, default_name=name)
        except ConfigError as error:
            raise placed(error, home) from error
        if not callable(made):
            raise ConfigError(key, f"a {target.__name__} cannot be called")
        return made
    components.check(spec, kind, key, given=given, default_name=name)
    return functools.partial(target, **_options(spec))


def _sampler(spec: TrainSet | TestSet, components: Components, key: str) -> Sampler | None:
    given = spec.sampler if isinstance(spec, TrainSet) else None
    if given is None:
        return None
    home, key = key, f"{key}.sampler"
    target = components.target(given, registry.samplers, key, None)
    arguments = 1 if isinstance(target, type) else 3  # values; for a function seed and epoch too
    components.check(given, registry.samplers, key, given=arguments, extra=_OF_THE_SAMPLER)
    by = given.get("by")
    if isinstance(by, dict):
        by = _callable(by, components, registry.datasets, home, "sampler.by", 1)
    elif not isinstance(by, str | None):
        raise ConfigError(
            f"{key}.by", f"{by!r} is neither an attribute of the dataset nor a component"
        )
    return Sampler(target, by, **_options(given, *_OF_THE_SAMPLER))


def _options(spec: Component, *without: str) -> dict[str, Any]:
    return {k: v for k, v in spec.items() if k not in ("name", "_target_", *without)}
