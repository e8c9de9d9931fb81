"""Planned: what loaders of either kind share: how epochs are cut, and the way to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from phaseloop.engine import rng
from phaseloop.engine.data.plan import BatchPlan
from phaseloop.engine.data.source import Data
from phaseloop.engine.data.transfer import Generator, by_function, to_device


class SetsAside:
    """Reads with the generators of this process put aside, and gives them back."""

    _aside: rng.HostGenerators | None = None

    def put_back(self) -> None:
        """Give this process its generators back, if they are still set for reading.

        Called again when a signal has cut short reading, and perhaps this very call.
        """
        if self._aside is not None:
            self._aside.put_back()
            self._aside = None


class Planned:
    """One set of samples with its plans, by the epoch that each holds from."""

    key: str
    _data: Data
    _device: torch.device
    _pinned: bool
    _repeat: bool
    _plans: dict[int, BatchPlan]

    place: Callable[[Any], Any] | None = None
    """What a batch on the device still needs; see :class:`~phaseloop.engine.backends.Backend`."""

    generator: Generator | None = None
    """Of the device; None: it has none."""

    @property
    def transforms(self) -> bool:
        """A function is called with each micro-batch, and gives another."""
        return self._data.batch_transform is not None

    @property
    def views(self) -> int:
        """How many inputs a batch has: of several, they are a tuple."""
        return self._data.views

    @property
    def plan(self) -> BatchPlan:
        """How the first epoch is cut."""
        return self._plans[1]

    @property
    def plans(self) -> dict[int, BatchPlan]:
        """How epochs are cut: from an epoch on, until the next one that is named."""
        return {1: self.plan} if self._repeat else self._plans

    def plan_of(self, epoch: int) -> BatchPlan:
        """How one epoch is cut; of a stream, as far as that is known before."""
        return self.plans[max(first for first in self.plans if first <= max(epoch, 1))]

    def cut_smaller(self, largest: int) -> None:
        """From the next call of ``batches`` on, no micro-batch has more samples than this."""
        self._plans = {
            first: dataclasses.replace(plan, largest=largest) for first, plan in self._plans.items()
        }

    def _moved(self, data: Any) -> Any:
        """What the dataset and its collate function made, on the device and in its place there."""
        if self._data.to_device is not None:
            data = by_function(self._data.to_device, data, self._device, self.generator)
        elif self._device.type != "cpu":
            data = to_device(data, self._device, non_blocking=self._pinned)
        return data if self.place is None else self.place(data)
