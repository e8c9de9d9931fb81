"""Augment: training data changed at random on the device, batch by batch.

Each sample has draws of its own: a pure function of (seed, source, epoch, position in the epoch's
order, view, number of the draw), worked out on the device by a hash. There is no generator, so
there is nothing to save, and processes, micro-batches and interruptions change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phaseloop.engine import rng
from phaseloop.engine.data.batch import Batch
from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.facts import name_of

Augmentation = Callable[[Tensor, "Draws"], Tensor]


class Draws:
    """Random numbers for the samples of a micro-batch; each call gives new ones.

    Args:
        keys: one for each sample, int64 of shape [B], on the device where numbers are wanted.
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        self._given = 0

    def uniform(self, *shape: int) -> Tensor:
        """Float32 of shape [B, *shape], from 0 to below 1, in steps of 2**-24."""
        size = math.prod(shape)
        first, self._given = self._given, self._given + size
        numbers = torch.arange(first, self._given, device=self._keys.device)
        bits = _mixed(self._keys[:, None], numbers)
        return _shifted(bits, 40).float().mul_(2.0**-24).reshape(-1, *shape)

    def normal(self, *shape: int) -> Tensor:
        """Float32 of shape ``[B, *shape]``, of mean 0 and variance 1.

        Source: Box, Muller, "A note on the generation of random normal deviates", 1958.
        """
        radius, angle = self.uniform(*shape), self.uniform(*shape)
        return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos((2.0 * math.pi) * angle)


class Augment:
    """What ``data.train.augment`` and ``data.train.views`` say, as one function of a batch.

    Args:
        augmentations: by name, called one after the other as ``augmentation(images, draws)``.
        views: how many times each batch is augmented, by other draws.
        key: where the set stands in the configuration, for messages.
    """

    def __init__(self, augmentations: Mapping[str, Augmentation], views: int, key: str) -> None:
        self._augmentations = augmentations
        self._views = views
        self._key = key

    def __call__(self, data: Any, keys: Tensor) -> Any:
        """``data`` with another input; of several views, with a tuple of them.

        Args:
            data: a micro-batch on the device, in one of the forms that have an input.
            keys: one for each sample, int64 of shape [B], on the host.

        Raises:
            DataError: the input, or what an augmentation makes of it, is no tensor of B rows of
                floating-point numbers.
        """
        batch = Batch(data, keys, len(keys))
        given = batch.input
        if not isinstance(given, Tensor) or not given.is_floating_point():
            shown = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise DataError(
                f"{self._key}.augment: it works on an input that is one tensor of floating-point "
                f"numbers, and the data's is {shown}"
            )
        if len(given) != len(keys):
            raise DataError(
                f"{self._key}.augment: the input has {len(given)} rows for {len(keys)} samples"
            )
        placed = keys.to(given.device)
        made = tuple(self._view(given, placed, view) for view in range(self._views))
        return batch.with_input(made if self._views > 1 else made[0]).data

    def _view(self, given: Tensor, keys: Tensor, view: int) -> Tensor:
        draws = Draws(_mixed(keys, view))
        for name, augmentation in self._augmentations.items():
            given = augmentation(given, draws)
            if not isinstance(given, Tensor) or len(given) != len(keys):
                shown = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
                raise DataError(
                    f"{self._key}.augment.{name}: it gave {shown}, and not a tensor of "
                    f"{len(keys)} rows"
                )
        return given


def chain(given: Any, views: int, key: str) -> Augment | None:
    """The function of a set, or None where it changes nothing.

    Args:
        given: None, one augmentation, several in their order, or a mapping of names to them.

    Raises:
        ConfigError: ``views`` is less than 1, or something given cannot be called.
    """
    if views < 1:
        raise ConfigError(f"{key}.views", f"{views} is less than 1")
    listed = _listed(given)
    for name, one in listed.items():
        if not callable(one):
            raise ConfigError(f"{key}.augment.{name}", f"a {type(one).__name__} cannot be called")
    return Augment(listed, views, key) if listed or views > 1 else None


def _listed(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(name): one for name, one in given.items() if one is not None}
    if isinstance(given, Sequence):
        return {str(number): one for number, one in enumerate(given)}
    return {"0": given}


def names_of(given: Any) -> list[str | None]:
    """What a set's augmentations are called, in their order, for comparing runs."""
    return [name_of(one) for one in _listed(given).values()]


def sample_keys(seed: int | Sequence[int], first: int, size: int, sources: Tensor | None) -> Tensor:
    """Keys of ``size`` samples that follow each other from position ``first`` on.

    Args:
        seed: hash of all but the position; of a mix, one for each source.
        sources: of a mix, the source of each sample, int64 of shape [size]; else None.
    """
    positions = torch.arange(first, first + size)
    seeds = [seed] if isinstance(seed, int) else seed
    begin = torch.tensor([_signed(rng.mix(one, _PURPOSE)) for one in seeds])
    return _mixed(begin[0 if sources is None else sources], positions)


_PURPOSE = rng.AUGMENT


def _signed(number: int) -> int:
    """An unsigned 64-bit number as torch holds it."""
    return number - (1 << 64) if number >> 63 else number


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros.

    Torch's brings in the sign, and torch_xla's rounds a negative number the other way: so the sign
    is taken off before, and set where it would have come to stand.
    """
    sign = (z < 0).long() << (63 - bits)
    return ((z & ((1 << 63) - 1)) >> bits) | sign


def _mixed(state: Tensor, part: Tensor | int) -> Tensor:
    """:func:`phaseloop.engine.rng.mix` of one part, of tensors; int64 overflows as it has to."""
    z = (state ^ part) + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)
