"""The order of an epoch: a function of (seed, epoch, roll-backs) and of nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phaseloop.engine import rng

RANDPERM_LIMIT = 1 << 24
"""Above this many samples a permutation is computed where it is needed, not stored."""

_ROUNDS = 4

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


Order = Sequential | Permutation | KeyedPermutation


def epoch_order(
    samples: int, *, shuffle: bool, seed: int, epoch: int, roll_backs: int = 0
) -> Order:
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
    key = rng.mix(seed, rng.ORDER, epoch, roll_backs)
    kind = Permutation if samples <= RANDPERM_LIMIT else KeyedPermutation
    return kind(samples, key)
