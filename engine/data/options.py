"""Options of a set of samples, as plain numbers, and their checks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from phaseloop.engine.errors import ConfigError

Limit = int | float | None
"""A number of samples (int), a fraction of them (float, more than 0, at most 1), or all (None)."""


def limited(samples: int, limit: Limit) -> int:
    """How many of ``samples`` a limit leaves: a fraction is rounded, and leaves one at least."""
    if limit is None:
        return samples
    return limit if isinstance(limit, int) else max(1, round(samples * limit))


def check_limit(limit: Limit, samples: int | None, key: str) -> None:
    """Raises ConfigError for a limit that is out of range; ``samples`` None: not known yet."""
    if limit is None:
        return
    if isinstance(limit, int):
        if limit < 1:
            raise ConfigError(key, f"{limit} is less than 1 sample (a fraction is written 0.1)")
        if samples is not None and limit > samples:
            raise ConfigError(key, f"{limit} is more than the {samples} samples there are")
    elif not 0 < limit <= 1:
        raise ConfigError(key, f"{limit} is not a fraction: more than 0, at most 1")


def check_weight(weight: float, key: str) -> None:
    """Raises ConfigError for a weight that is not a positive number."""
    if not 0 < weight < float("inf"):
        raise ConfigError(key, f"{weight} is not a positive number")


class Options(Protocol):
    """What :class:`Data` and the configuration's schema have in common."""

    @property
    def batch_size(self) -> int | Mapping[int, int]: ...

    micro_batch_size: int | None
    accumulate: int | None
    workers: int
    prefetch: int
    pin_memory: bool | None
    limit: Limit


def check_options(options: Options, key: str) -> None:
    """Raises ConfigError for a number out of range and for options that contradict each other."""
    _check_sizes(options.batch_size, f"{key}.batch_size")
    least = {"micro_batch_size": 1, "accumulate": 1, "workers": 0, "prefetch": 1,
             "rebuild_every": 1}  # fmt: skip
    for name, bound in least.items():
        value = getattr(options, name, None)
        if value is not None and value < bound:
            raise ConfigError(f"{key}.{name}", f"{value} is less than {bound}")
    if options.micro_batch_size is not None and options.accumulate is not None:
        raise ConfigError(f"{key}.accumulate", "give micro_batch_size or accumulate, not both")
    if options.pin_memory and not options.workers:
        raise ConfigError(f"{key}.pin_memory", "only what workers read is pinned: set workers too")
    check_limit(options.limit, None, f"{key}.limit")


def batch_sizes(given: int | Mapping[int, int]) -> dict[int, int]:
    """Epoch to batch size from there on, in order."""
    return {1: given} if isinstance(given, int) else dict(sorted(given.items()))


def _check_sizes(given: int | Mapping[int, int], key: str) -> None:
    sizes = batch_sizes(given)
    if 1 not in sizes:
        raise ConfigError(key, "a mapping of sizes by epoch must begin with epoch 1")
    for epoch, size in sizes.items():
        if epoch < 1:
            raise ConfigError(key, f"epoch {epoch}: epochs are counted from 1")
        if size < 1:
            place = key if isinstance(given, int) else f"{key}.{epoch}"
            raise ConfigError(place, f"{size} is less than 1")
