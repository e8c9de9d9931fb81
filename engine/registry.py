"""Registries: how steps, hooks, models and the rest find their way in by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from phaseloop.engine.errors import RegistryError, listing, nearest

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Entry:
    """One registered object, and what it declared about itself."""

    name: str
    target: Callable[..., Any]
    declared: Mapping[str, Any]

    @property
    def place(self) -> str:
        """Where it stands in the source, which is read only now."""
        return _place(self.target)


class Registry:
    """Names for one kind of thing.

    Args:
        kind: what the entries are, in the singular; used in every message.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, *, replace: bool = False, **declared: Any) -> Callable[[T], T]:
        """Decorator that registers a function or class under ``name``.

        Args:
            name: the name that a configuration uses.
            replace: take the place of an earlier entry (a notebook cell run again).
            declared: facts about the entry that the engine asks for, e.g. ``default=True``.

        Raises:
            RegistryError: the name is taken; the message says where it was first registered.
        """

        def decorate(target: T) -> T:
            taken = self._entries.get(name)
            if taken is not None and not replace:
                raise RegistryError(
                    f"{self.kind} {name!r} is already registered at {taken.place}; "
                    f"the second is at {_place(target)}. Use another name, or replace=True."
                )
            entry = Entry(name, target, MappingProxyType(dict(declared)))
            self._entries[name] = entry
            return target

        return decorate

    def get(self, name: str) -> Entry:
        """The entry called ``name``.

        Raises:
            RegistryError: there is none; the message gives the nearest name and all names.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise RegistryError(
                f"no {self.kind} is called {name!r}.{nearest(name, self._entries)} "
                f"Registered: {listing(self._entries)}. "
                f"One of your own is found once its module is named in 'imports'."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))


def _place(target: Any) -> str:
    """``file:line`` of a function or class, as far as Python knows it."""
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"


train_steps = Registry("train step")
hooks = Registry("hook")
models = Registry("model")
datasets = Registry("dataset")
collates = Registry("collate function")
samplers = Registry("sampler")
batch_transforms = Registry("batch transform")
augmentations = Registry("augmentation")
transfers = Registry("to_device function")
criteria = Registry("criterion")
meters = Registry("meter")
optimizers = Registry("optimizer")
schedules = Registry("schedule")
backends = Registry("backend")


def register_train_step(
    name: str,
    *,
    whole_model_forward: bool = False,
    takes: str = "micro_batch",
    one_piece: bool = False,
    across_samples: bool = False,
    check: Callable[[Any, Any], None] | None = None,
    replace: bool = False,
) -> Callable[[T], T]:
    """Register a train step: a function of the task, or a class whose instances are called with it.

    Args:
        name: the name for ``train_step:``.
        whole_model_forward: the step calls the model as a whole, once per micro-batch, so that
            a wrapper which reduces gradients while backward runs may be used.
        takes: ``micro_batch``: it is called for each, and gets it by ``task.next_batch()``;
            ``window``: it is called once per update, and goes through ``task.window()``.
        one_piece: it cannot work on a batch that is cut into several micro-batches.
        across_samples: its loss looks at the samples of a pass together, and not at each: where
            a batch is cut, by micro-batches or processes, one warning says so.
        check: called as ``check(task, step)`` once all is built, before any batch is read; it
            raises ConfigError for what the step needs and the task has not. A class may have a
            method ``check(task)`` as well.
        replace: take the place of an earlier entry.

    Raises:
        RegistryError: the name is taken.
    """
    return train_steps.register(
        name,
        replace=replace,
        whole_model_forward=whole_model_forward,
        takes=takes,
        one_piece=one_piece,
        across_samples=across_samples,
        check=check,
    )


def register_hook(name: str, *, default: bool = False, replace: bool = False) -> Callable[[T], T]:
    """Register a hook class. ``default``: on when a Python user names no hooks of their own."""
    return hooks.register(name, replace=replace, default=default)


def register_sampler(name: str, *, by: str = "targets", replace: bool = False) -> Callable[[T], T]:
    """Register a sampler; see :class:`phaseloop.engine.data.samplers.Sampler`.

    Args:
        name: the name for ``data.train.sampler``.
        by: the dataset's attribute that it goes by, where a configuration names none.
        replace: take the place of an earlier entry.

    Raises:
        RegistryError: the name is taken.
    """
    return samplers.register(name, replace=replace, by=by)


register_model = models.register
register_dataset = datasets.register
register_collate = collates.register
register_batch_transform = batch_transforms.register
register_augmentation = augmentations.register
register_to_device = transfers.register
register_criterion = criteria.register
register_meter = meters.register
register_optimizer = optimizers.register
register_schedule = schedules.register
register_backend = backends.register
