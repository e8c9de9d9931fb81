"""Mix: several sources of training data, mixed by weight, in an order that can be entered anywhere.

Which source a position belongs to is drawn for the whole epoch; within a source, samples are taken
in one permutation after the other. Both are functions of (seed, epoch) and of the position.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phaseloop.engine import rng
from phaseloop.engine.data.options import Limit, check_limit, check_weight, limited
from phaseloop.engine.data.order import Blocks, Passes, chosen
from phaseloop.engine.data.stream_reader import is_stream
from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.facts import fingerprint

_BLOCK = 1 << 14


@dataclass
class Source:
    """One source of a :class:`Mix`.

    Args:
        dataset: anything with ``len`` and ``__getitem__``, ``__getitems__`` or ``fetch``.
        weight: its share of the positions is this over the sum of all weights.
        limit: take part of it only: a number of samples, or a fraction of them.
    """

    dataset: Any
    weight: float = 1.0
    limit: Limit = None


class Mix:
    """Several datasets as one. Its samples are numbered through, one source after the other.

    Args:
        sources: name to source, or to a dataset, which then has weight 1.
        epoch_samples: length of an epoch; None: the sum of the sources' lengths.
        key: where the sources stand in the configuration, for messages.

    Raises:
        ConfigError: there is no source, or one without a length, with a weight that is not
            positive, or with a limit that is out of range.
        DataError: a source is empty.

    Attributes:
        names: of the sources; a batch's ``sources`` are numbers in this list.
        datasets: in the same order.
    """

    def __init__(
        self,
        sources: Mapping[str, Source | Any],
        epoch_samples: int | None = None,
        key: str = "data.train.mix",
    ) -> None:
        made = {n: s if isinstance(s, Source) else Source(s) for n, s in sources.items()}
        _check(made, epoch_samples, key)
        self.names = list(made)
        self.datasets = [source.dataset for source in made.values()]
        self.weights = [float(source.weight) for source in made.values()]
        self._limits = [source.limit for source in made.values()]
        self.lengths = [limited(len(s.dataset), s.limit) for s in made.values()]
        self.offsets = [0, *itertools.accumulate(len(dataset) for dataset in self.datasets)]
        self._starts = torch.tensor(self.offsets[1:])
        self._samples = sum(self.lengths) if epoch_samples is None else epoch_samples

    def __len__(self) -> int:
        """Positions in an epoch."""
        return self._samples

    def split(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of samples, int64 [B], as (index in its source, number of the source)."""
        sources = torch.searchsorted(self._starts, numbers, right=True)
        return numbers - torch.tensor(self.offsets)[sources], sources

    def order(self, *, shuffle: bool, seed: int, epoch: int, roll_backs: int) -> MixOrder:
        """The order of one epoch; ``shuffle`` False: each source in its own order."""
        return MixOrder(self, shuffle, seed, epoch, roll_backs)

    def facts(self) -> dict[str, Any]:
        """What makes this mix the one it is, as plain Python."""
        return {
            name: [weight, len(dataset), limit, *filter(None, [fingerprint(dataset)])]
            for name, weight, dataset, limit in zip(
                self.names, self.weights, self.datasets, self._limits, strict=True
            )
        }

    def chosen(self, source: int, seed: int) -> Tensor | None:
        """What is left of a source by its limit; None: all of it."""
        limit = self._limits[source]
        return chosen(len(self.datasets[source]), limit, rng.mix(seed, rng.LIMIT, source))


class MixOrder:
    """The order of one epoch of a mix, in constant memory.

    The epoch is cut into blocks of 16,384 positions. How many positions of each block belong to
    each source is one multinomial draw, and where they are in it is one permutation: together
    that is an independent draw for each position. So an epoch of 10^8 positions needs a table of
    some 6,000 rows and milliseconds, from whichever position it is entered; a block is worked out
    when it is reached. The draws are NumPy's ``RandomState``, whose stream never changes.
    """

    def __init__(self, mix: Mix, shuffle: bool, seed: int, epoch: int, roll_backs: int) -> None:
        self._mix = mix
        self._count = len(mix.names)
        self._key = rng.mix(seed, rng.MIX_CHOICE, epoch, roll_backs)
        self._before = _counts(len(mix), mix.weights, self._key)
        keys = [rng.mix(seed, rng.MIX_ORDER, n, epoch, roll_backs) for n in range(len(mix.names))]
        self._passes = [
            Passes(length, key if shuffle else None)
            for length, key in zip(mix.lengths, keys, strict=True)
        ]
        self._chosen = [mix.chosen(n, seed) for n in range(len(mix.names))]
        self._blocks = Blocks(_BLOCK, self._work_out, self._pick)
        self._kinds = (-1, torch.empty(0, dtype=torch.int64))  # a block, and the sources in it

    def slice(self, start: int, stop: int) -> Tensor:
        """Numbers of the samples at the positions start to stop-1: int64 [stop - start]."""
        return self._blocks.slice(start, stop)

    def _work_out(self, block: int) -> Tensor:
        return self._pick(block, 0, _BLOCK)

    def _pick(self, block: int, start: int, stop: int) -> Tensor:
        kinds = self._kinds_of(block)
        here = kinds[start:stop]
        before = self._before[block] + np.bincount(kinds[:start].numpy(), minlength=self._count)
        counts = np.bincount(here.numpy(), minlength=self._count)
        numbers = torch.empty_like(here)
        for source in np.flatnonzero(counts).tolist():
            first = int(before[source])
            indices = self._passes[source].slice(first, first + int(counts[source]))
            kept = self._chosen[source]
            indices = indices if kept is None else kept[indices]
            numbers[here == source] = indices + self._mix.offsets[source]
        return numbers

    def _kinds_of(self, block: int) -> Tensor:
        """The source of each position of a block: int64."""
        if self._kinds[0] != block:
            sizes = torch.from_numpy(self._before[block + 1] - self._before[block])
            generator = torch.Generator().manual_seed(rng.mix(self._key, block))
            kinds = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            kinds = kinds[torch.randperm(len(kinds), generator=generator)]
            self._kinds = (block, kinds)
        return self._kinds[1]


def _counts(samples: int, weights: list[float], key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Positions of each source before each block, and of all: int64 [blocks + 1, sources]."""
    shares = np.array(weights) / np.sum(weights)
    draw = np.random.RandomState([key >> 32, key & 0xFFFFFFFF])
    full, rest = divmod(samples, _BLOCK)
    counts = [np.zeros((1, len(weights)), dtype=np.int64), draw.multinomial(_BLOCK, shares, full)]
    if rest:
        counts.append(draw.multinomial(rest, shares, 1))
    return np.cumsum(np.concatenate(counts), axis=0, dtype=np.int64)


def _check(sources: Mapping[str, Source], epoch_samples: int | None, key: str) -> None:
    if not sources:
        raise ConfigError(key, "there is no source in it")
    if epoch_samples is not None and epoch_samples < 1:
        raise ConfigError(
            f"{key.removesuffix('.mix')}.epoch_samples", f"{epoch_samples} is less than 1"
        )
    for name, source in sources.items():
        check_weight(source.weight, f"{key}.{name}.weight")
        if is_stream(source.dataset):
            raise ConfigError(
                f"{key}.{name}.dataset",
                f"{type(source.dataset).__name__} is a stream, and the sources of a mix are drawn "
                f"by index: mix streams in a stream of your own",
            )
        if not hasattr(source.dataset, "__len__"):
            kind = type(source.dataset).__name__
            raise ConfigError(f"{key}.{name}.dataset", f"{kind} has no length")
        if len(source.dataset) == 0:
            raise DataError(f"{key}.{name}: the dataset is empty: it has 0 samples")
        check_limit(source.limit, len(source.dataset), f"{key}.{name}.limit")
    if not all(hasattr(source.dataset, "fetch") for source in sources.values()):
        for name, source in sources.items():
            if not (
                hasattr(source.dataset, "__getitem__") or hasattr(source.dataset, "__getitems__")
            ):
                raise ConfigError(
                    f"{key}.{name}.dataset",
                    f"{type(source.dataset).__name__} gives batches only (fetch), and other "
                    f"sources of the mix give samples only: give it a __getitem__",
                )
