"""Epochs: which samples an epoch of a set reads, and in which order.

A function of (seed, epoch, roll-backs) and of the set's options, and of nothing else.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from phaseloop.engine import rng
from phaseloop.engine.data.mix import Mix
from phaseloop.engine.data.order import Chosen, Order, Sequential, chosen, epoch_order
from phaseloop.engine.data.samplers import Orders
from phaseloop.engine.data.source import Data
from phaseloop.engine.errors import DataError


class Epochs:
    """The epochs of one set.

    Args:
        data: the set, opened and checked.
        train: training data; a test set is read in its own order.
        source: number of the set among those of its kind.
        seed: the run's seed.
        key: where it stands in the configuration.

    Raises:
        ConfigError: the sampler has no values to go by.
        DataError: an epoch is too small to make one batch.

    Attributes:
        dataset: the dataset of the epoch at hand.
        samples: positions in an epoch.
    """

    def __init__(self, data: Data, *, train: bool, source: int, seed: int, key: str) -> None:
        self._data = data
        self._train = train
        self._seed = seed
        self._key = key
        kind = rng.SAMPLE_TRAIN if train else rng.SAMPLE_TEST
        self._limit_seed = rng.mix(seed, rng.LIMIT, kind, source)
        self.dataset: Any = data.first
        self._length = len(self.dataset)
        self._made_for = 1
        self._take()
        data.check_samples(self.samples, key)

    def beside(self, data: Data) -> Epochs:
        """The same at this moment; from now on each makes datasets for itself, this of ``data``."""
        other = copy.copy(self)
        other._data = data
        return other

    def is_due(self, epoch: int) -> bool:
        """The dataset has to be made again for this epoch."""
        return self._due(epoch) != self._made_for

    def let_go(self) -> None:
        """Give up the dataset at hand: else there would be two in memory while one is made."""
        self.dataset = self._data.first = None

    def rebuild(self, epoch: int) -> None:
        """Make the dataset of an epoch.

        Raises:
            DataError: it is not as long as before.
        """
        due = self._due(epoch)
        self.dataset = self._data.make(due, self._seed)
        if len(self.dataset) != self._length:
            raise DataError(
                f"{self._key}.rebuild_every: the dataset of epoch {due} has {len(self.dataset)} "
                f"samples, that of epoch 1 has {self._length}; every one must be as long"
            )
        self._made_for = due
        before = self.samples
        self._take()
        if self.samples != before:
            raise DataError(
                f"{self._key}.sampler: it draws {self.samples} samples from the dataset of epoch "
                f"{due}, and {before} from that of epoch 1; every epoch must be as long"
            )

    def _due(self, epoch: int) -> int:
        """The epoch that the dataset of this one is made for."""
        every = self._data.rebuild_every
        return 1 if every is None else epoch - (epoch - 1) % every

    def order(self, epoch: int, roll_backs: int) -> Order:
        """The order of one epoch, of the dataset at hand."""
        if isinstance(self.dataset, Mix):
            return self.dataset.order(
                shuffle=self._data.shuffled, seed=self._seed, epoch=epoch, roll_backs=roll_backs
            )
        order: Order
        if self._orders is not None:
            order = self._orders.order(rng.mix(self._seed, rng.SAMPLER, roll_backs), epoch)
        elif not self._train:
            order = Sequential(self.samples)
        else:
            order = epoch_order(
                self.samples,
                shuffle=self._data.shuffled,
                seed=self._seed,
                epoch=epoch,
                roll_backs=roll_backs,
            )
        return order if self._chosen is None else Chosen(order, self._chosen)

    def _take(self) -> None:
        """Look at the dataset at hand: what its limit leaves, and what its sampler draws."""
        sampler = self._data.sampler
        self._chosen: Tensor | None = None
        self._orders: Orders | None = None
        if not isinstance(self.dataset, Mix):
            self._chosen = chosen(self._length, self._data.limit, self._limit_seed)
        if sampler is not None:
            self._orders = sampler.orders(self.dataset, self._chosen, f"{self._key}.sampler")
        left = self._length if self._chosen is None else len(self._chosen)
        self.samples = left if self._orders is None else self._orders.samples
