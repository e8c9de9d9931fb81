"""Samplers: which samples an epoch draws, by their labels or weights, and in which order.

A sampler is asked for the order of an epoch, and its answer depends on nothing but its values, a
seed and the epoch; so it does not matter where an epoch is entered, by how many processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phaseloop.engine import registry, rng
from phaseloop.engine.data.order import Blocks, Order, Passes, uniform
from phaseloop.engine.data.places import placed
from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.facts import fact_of, name_of
from phaseloop.engine.registry import register_sampler

_BLOCK = 1 << 17  # of a class in a thousand, some hundred samples are taken at once


class Sampler:
    """What ``Data.sampler`` takes: a kind of sampler, what it goes by, and its options.

    Args:
        kind: the name of a registered sampler; or a function ``(values, seed, epoch, **options)``
            that gives an order; or a class that is made with ``(values, **options)`` and whose
            instances are called with ``(seed, epoch)`` and give an order. An order is an int64
            tensor of positions in ``values``, or an object with ``slice(start, stop)``, which
            gives such a tensor, and ``len``. It must be as long in every epoch.
        by: the values, one for each sample: the name of an attribute of the dataset, a function
            of the dataset that gives them, or the values themselves; None: as the kind declares.
        options: further options of the kind.

    Raises:
        RegistryError: no sampler has this name.
    """

    def __init__(self, kind: str | Callable[..., Any], by: Any = None, **options: Any) -> None:
        entry = registry.samplers.get(kind) if isinstance(kind, str) else None
        declared = next((e for e in registry.samplers if e.target is kind), entry)
        self.target: Callable[..., Any] = entry.target if entry is not None else kind  # type: ignore[assignment]
        self.by = by if by is not None else (declared.declared["by"] if declared else "targets")
        self.options = options

    def check(self, dataset: Any, key: str) -> None:
        """Raises ConfigError when ``by`` names an attribute that the dataset does not have."""
        if isinstance(self.by, str) and not hasattr(dataset, self.by):
            raise ConfigError(
                f"{key}.by",
                f"{type(dataset).__name__} has no attribute {self.by!r}; name another one, or give "
                f"a function of the dataset",
            )

    def orders(self, dataset: Any, chosen: Tensor | None, key: str) -> Orders:
        """The orders of all epochs.

        Args:
            dataset: what is sampled.
            chosen: numbers of the samples that its limit leaves; None: all.
            key: where the sampler stands in the configuration.

        Raises:
            ConfigError: there are no values, or not as many as samples.
        """
        self.check(dataset, key)
        values = _values(self.by, dataset, f"{key}.by")
        if len(values) != len(dataset):
            raise ConfigError(
                f"{key}.by",
                f"it gives {len(values)} values for the {len(dataset)} samples of the dataset",
            )
        values = values if chosen is None else values[chosen.numpy()]
        try:
            if isinstance(self.target, type):
                return Orders(self.target(values, **self.options), key)
            return Orders(functools.partial(self.target, values, **self.options), key)
        except (ConfigError, DataError) as error:
            raise placed(error, key.removesuffix(".sampler")) from error

    def facts(self) -> dict[str, Any]:
        """What makes this sampler the one it is, as plain Python."""
        options = {name: fact_of(value) for name, value in self.options.items()}
        return {"kind": name_of(self.target), "by": fact_of(self.by), **options}


class Orders:
    """The orders that a sampler gives, checked: each as long as the first.

    Args:
        make: called with ``seed=`` and ``epoch=``.
        key: where the sampler stands in the configuration.
    """

    def __init__(self, make: Callable[..., Any], key: str) -> None:
        self._make = make
        self._key = key
        self.samples = len(self._ask(0, 1))
        if not self.samples:
            raise DataError(f"{key}: it draws no sample")

    def order(self, seed: int, epoch: int) -> Order:
        """The order of one epoch.

        Raises:
            DataError: it is not as long as the first, or no order.
        """
        given = self._ask(seed, epoch)
        if len(given) != self.samples:
            raise DataError(
                f"{self._key}: it draws {len(given)} samples in epoch {epoch} and {self.samples} "
                f"in epoch 1; every epoch must be as long"
            )
        return _Listed(given) if isinstance(given, Tensor) else given

    def _ask(self, seed: int, epoch: int) -> Any:
        given = self._make(seed=seed, epoch=epoch)
        if isinstance(given, Tensor) and given.dim() == 1 and not given.is_floating_point():
            return given.long()
        if not isinstance(given, Tensor) and hasattr(given, "slice") and hasattr(given, "__len__"):
            return given
        raise DataError(
            f"{self._key}: a sampler gives an int64 tensor of one dimension, or an object with "
            f"slice(start, stop) and a length, not {type(given).__name__}"
        )


class _Listed:
    """An order that is stored."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers

    def slice(self, start: int, stop: int) -> Tensor:
        return self._numbers[start:stop]


@register_sampler("balanced", by="targets")
class Balanced:
    """As many draws of each class in every epoch, and nearly as many in every batch.

    Positions come in rounds: each holds every class once, in an order of its own. The samples of
    a class are taken in one permutation after the other, so none comes again before all others
    of its class have come; each epoch begins anew.

    Args:
        labels: one for each sample, of any kind that can be sorted.
        per_class: draws per class and epoch; None: the samples over the classes, rounded up.

    Raises:
        ConfigError: ``per_class`` is less than 1.
    """

    def __init__(self, labels: Any, per_class: int | None = None) -> None:
        if per_class is not None and per_class < 1:
            raise ConfigError("data.train.sampler.per_class", f"{per_class} is less than 1")
        labels = np.asarray(labels)
        counts = np.unique(labels, return_counts=True)[1]
        members = torch.from_numpy(np.argsort(labels, kind="stable"))
        self.members = list(torch.split(members, counts.tolist()))
        self.rounds = per_class or -(-len(labels) // len(counts))

    def __call__(self, seed: int, epoch: int) -> BalancedOrder:
        """The order of one epoch."""
        return BalancedOrder(self.members, self.rounds, rng.mix(seed, epoch))


class BalancedOrder:
    """An epoch of :class:`Balanced`, worked out some 131,072 positions at a time."""

    def __init__(self, members: list[Tensor], rounds: int, seed: int) -> None:
        self._members = members
        self._rounds = rounds
        self._seed = seed
        self._passes = [Passes(len(m), rng.mix(seed, n)) for n, m in enumerate(members)]
        self._rounds_per_block = max(1, _BLOCK // len(members))
        self._blocks = Blocks(self._rounds_per_block * len(members), self._work_out, self._pick)
        self._places = (-1, torch.empty(0))  # a block, and what the order of its rounds goes by

    def __len__(self) -> int:
        return self._rounds * len(self._members)

    def slice(self, start: int, stop: int) -> Tensor:
        """Numbers of the samples at the positions start to stop-1: int64 [stop - start]."""
        return self._blocks.slice(start, stop)

    def _work_out(self, block: int) -> Tensor:
        start, stop = self._rounds_of(block)
        columns = [
            members[passes.slice(start, stop)]
            for members, passes in zip(self._members, self._passes, strict=True)
        ]
        rounds = torch.stack(columns, dim=1)
        return rounds.gather(1, self._places_of(block).argsort(dim=1, stable=True)).flatten()

    def _pick(self, block: int, start: int, stop: int) -> Tensor:
        count = len(self._members)
        first, last = start // count, -(-stop // count)
        places = self._places_of(block)[first:last].argsort(dim=1, stable=True)
        classes = places.flatten()[start - first * count : stop - first * count].tolist()
        begin = self._rounds_of(block)[0]
        numbers = []
        for position, number in enumerate(classes, start):
            at = begin + position // count
            numbers.append(self._members[number][self._passes[number].slice(at, at + 1)])
        return torch.cat(numbers)

    def _rounds_of(self, block: int) -> tuple[int, int]:
        start = block * self._rounds_per_block
        return start, min(start + self._rounds_per_block, self._rounds)

    def _places_of(self, block: int) -> Tensor:
        """For each round of a block, what sorts its classes: float64 [rounds, classes]."""
        if self._places[0] != block:
            start, stop = self._rounds_of(block)
            generator = torch.Generator().manual_seed(rng.mix(self._seed, -1, block))
            shape = (stop - start, len(self._members))
            self._places = block, torch.rand(shape, generator=generator, dtype=torch.float64)
        return self._places[1]


@register_sampler("weighted", by="weights")
class Weighted:
    """Each position draws a sample anew, with a probability in proportion to its weight.

    Args:
        weights: one for each sample, none negative.
        samples: draws per epoch; None: as many as there are samples.

    Raises:
        ConfigError: ``samples`` is less than 1, a weight is negative or not finite, or all are 0.
    """

    def __init__(self, weights: Any, samples: int | None = None) -> None:
        if samples is not None and samples < 1:
            raise ConfigError("data.train.sampler.samples", f"{samples} is less than 1")
        values = np.asarray(weights, dtype=np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all() and values.sum() > 0):
            raise ConfigError(
                "data.train.sampler.by", "weights are at least 0, finite, and not all 0"
            )
        self.sums = np.cumsum(values)
        self.last = len(values) - 1 - int(np.argmax(values[::-1] > 0))
        self.samples = samples or len(values)

    def __call__(self, seed: int, epoch: int) -> WeightedOrder:
        """The order of one epoch."""
        return WeightedOrder(self, rng.mix(seed, epoch))


class WeightedOrder:
    """An epoch of :class:`Weighted`: each draw is a function of its position."""

    def __init__(self, weighted: Weighted, seed: int) -> None:
        self._weighted = weighted
        self._seed = seed

    def __len__(self) -> int:
        return self._weighted.samples

    def slice(self, start: int, stop: int) -> Tensor:
        """Numbers of the samples at the positions start to stop-1: int64 [stop - start]."""
        sums, last = self._weighted.sums, self._weighted.last
        found = np.searchsorted(sums, uniform(start, stop, self._seed) * sums[-1], side="right")
        return torch.from_numpy(np.minimum(found, last).astype(np.int64))


def _values(by: Any, dataset: Any, key: str) -> npt.NDArray[Any]:
    if isinstance(by, str):
        by = getattr(dataset, by)
    elif callable(by):
        by = by(dataset)
    values = np.asarray(by)
    if values.ndim != 1:
        raise ConfigError(key, f"one value is due for each sample, not shape {list(values.shape)}")
    return values
