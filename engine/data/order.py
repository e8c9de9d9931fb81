"""The order of an epoch: a function of (seed, epoch, roll-backs) and of nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phaseloop.engine import rng
from phaseloop.engine.data.options import Limit, limited

RANDPERM_LIMIT = 1 << 24
"""Above this many samples a permutation is computed where it is needed, not stored."""

_ROUNDS = 4

_PICKS = 16  # out of one block: so many cost about what the whole block does

_AT_ONCE = 1 << 20  # positions whose images are computed together, where many are asked for

Words = npt.NDArray[np.uint64]


class Sequential:
    """Samples in the order of the dataset."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def slice(self, start: int, stop: int) -> Tensor:
        """Dataset indices at the positions start to stop-1: int64 of shape [stop - start]."""
        return torch.arange(start, stop)


class Permutation:
    """A stored random permutation, for up to :data:`RANDPERM_LIMIT` samples."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(samples, generator=generator)

    def slice(self, start: int, stop: int) -> Tensor:
        """Dataset indices at the positions start to stop-1: int64 of shape [stop - start]."""
        return self._order[start:stop]


class KeyedPermutation:
    """A permutation by a keyed Feistel network with cycle walking: constant memory.

    Positions are split into two halves of equal width and mixed in four rounds; an image that
    falls outside [0, samples) is mixed again until it falls inside, which keeps the map one to
    one (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        half = max(1, ((samples - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        self._keys = [np.uint64(rng.mix(seed, turn)) for turn in range(_ROUNDS)]

    def slice(self, start: int, stop: int) -> Tensor:
        """Dataset indices at the positions start to stop-1: int64 of shape [stop - start]."""
        values = self._permute(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(values >= self.samples)
        while outside.size:
            values[outside] = self._permute(values[outside])
            outside = outside[values[outside] >= self.samples]
        return torch.from_numpy(values.astype(np.int64))

    def _permute(self, values: Words) -> Words:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_scramble(right ^ key) & self._mask)
        images: Words = (left << self._half) | right
        return images


def _scramble(values: Words) -> Words:
    """SplitMix64's finaliser on an array of uint64; overflow wraps, as it should."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


class Order(Protocol):
    """Which sample is read at which position of an epoch."""

    def slice(self, start: int, stop: int) -> Tensor:
        """Numbers of the samples at the positions start to stop-1: int64 of shape [stop - start].

        Any positions may be asked for; rising ones have to be cheap.
        """


def permutation(samples: int, seed: int) -> Permutation | KeyedPermutation:
    """A random order of ``samples`` samples, stored where that is cheap."""
    kind = Permutation if samples <= RANDPERM_LIMIT else KeyedPermutation
    return kind(samples, seed)


class Passes:
    """A set gone through again and again without an end, each pass in an order of its own.

    Only the pass at hand is kept, so that memory and the cost of beginning anywhere are those of
    one order.

    Args:
        samples: of the set.
        seed: of all passes; None: each in the set's own order.
    """

    def __init__(self, samples: int, seed: int | None) -> None:
        self._samples = samples
        self._seed = seed
        self._number = -1
        self._order: Order = Sequential(samples)

    def slice(self, start: int, stop: int) -> Tensor:
        """Indices at the ranks start to stop-1, counted over all passes: int64 [stop - start]."""
        parts = []
        while start < stop:
            number, first = divmod(start, self._samples)
            last = min(self._samples, first + stop - start)
            parts.append(self._pass(number).slice(first, last))
            start += last - first
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def _pass(self, number: int) -> Order:
        if self._seed is not None and number != self._number:
            self._order = permutation(self._samples, rng.mix(self._seed, number))
            self._number = number
        return self._order


class Blocks:
    """An order that is worked out in blocks when they are reached; the last one is kept.

    Who reads on where it stopped gets the whole block worked out. Who jumps, as one of a thousand
    processes does from its share of a batch to that of the next, gets what it asks for picked out
    of the block, as long as it does not come back to it again and again.

    Args:
        size: positions of a block.
        work_out: from the number of a block to its numbers; the last may be shorter.
        pick: from the number of a block and two places in it, start and stop, to its numbers
            there; the same numbers.
    """

    def __init__(
        self,
        size: int,
        work_out: Callable[[int], Tensor],
        pick: Callable[[int, int, int], Tensor],
    ) -> None:
        self._size = size
        self._work_out = work_out
        self._pick = pick
        self._number = -1
        self._block = torch.empty(0, dtype=torch.int64)
        self._reached = 0  # the position that was read up to
        self._picked = (-1, 0)  # a block, and how often something was picked out of it

    def slice(self, start: int, stop: int) -> Tensor:
        """Numbers of the samples at the positions start to stop-1: int64 [stop - start]."""
        parts = []
        while start < stop:
            number, first = divmod(start, self._size)
            last = min(self._size, first + stop - start)
            parts.append(self._part(number, first, last))
            start += last - first
            self._reached = start
        return torch.cat(parts) if parts else self._block[:0]

    def _part(self, number: int, first: int, last: int) -> Tensor:
        if number != self._number and not self._jumps(number, first):
            self._block, self._number = self._work_out(number), number
        if number == self._number:
            return self._block[first:last]
        return self._pick(number, first, last)

    def _jumps(self, number: int, first: int) -> bool:
        if number * self._size + first == self._reached:
            return False
        block, times = self._picked
        self._picked = (number, times + 1 if number == block else 1)
        return self._picked[1] <= _PICKS


class Chosen:
    """An order of some of the samples: positions in a choice, made numbers of the whole set.

    Args:
        order: of the choice.
        chosen: numbers of the samples that were chosen, int64.
    """

    def __init__(self, order: Order, chosen: Tensor) -> None:
        self._order = order
        self._chosen = chosen

    def slice(self, start: int, stop: int) -> Tensor:
        """Dataset indices at the positions start to stop-1: int64 of shape [stop - start]."""
        return self._chosen[self._order.slice(start, stop)]


def chosen(samples: int, limit: Limit, seed: int) -> Tensor | None:
    """The samples that a limit leaves, in the dataset's order: int64; None: all of them.

    Beside one order's, memory is that of what is left: 8 bytes a sample.
    """
    count = limited(samples, limit)
    if count == samples:
        return None
    order = permutation(samples, seed)
    left = torch.empty(count, dtype=torch.int64)
    for start in range(0, count, _AT_ONCE):
        stop = min(start + _AT_ONCE, count)
        left[start:stop] = order.slice(start, stop)
    left.numpy().sort()  # in place, which torch has not
    return left


def uniform(start: int, stop: int, seed: int) -> npt.NDArray[np.float64]:
    """Draws from [0, 1), one for each position start to stop-1, each a function of its position.

    SplitMix64's sequence (see :func:`phaseloop.engine.rng.mix`), its upper 53 bits.
    """
    steps = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = _scramble(steps + np.uint64(seed)) >> np.uint64(11)
    draws: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return draws


def epoch_order(
    samples: int, *, shuffle: bool, seed: int, epoch: int, roll_backs: int = 0
) -> Sequential | Permutation | KeyedPermutation:
    """The order of one epoch.

    Args:
        samples: number of samples in the dataset.
        shuffle: False: the dataset's own order.
        seed: the run's seed.
        epoch: number of the epoch, from 1.
        roll_backs: how often the run was rolled back.
    """
    if not shuffle:
        return Sequential(samples)
    return permutation(samples, rng.mix(seed, rng.ORDER, epoch, roll_backs))
