"""Epoch lengths: batches in each training epoch, and epochs in so many batches."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Any


class EpochLengths:
    """Batches in each training epoch.

    Args:
        given: the same number for all, or a mapping from an epoch to the number from there on,
            which begins with epoch 1; infinity where nobody knows.

    Attributes:
        known: it is known how long every epoch is; otherwise only :meth:`of` and ``even`` are.
    """

    def __init__(self, given: int | Mapping[int, int | float]) -> None:
        steps = {1: given} if isinstance(given, int) else dict(sorted(given.items()))
        self.known = all(length < math.inf for length in steps.values())
        self._firsts = list(steps)
        self._lengths: list[Any] = list(steps.values())  # numbers, but for what nobody knows
        # Windows before each of these epochs.
        self._before = [0]
        for (a, b), length in zip(pairwise(self._firsts), self._lengths, strict=False):
            self._before.append(self._before[-1] + (b - a) * length)

    @property
    def steps(self) -> dict[int, int]:
        """Epoch to batches in each from there on, until the next one that is named."""
        return dict(zip(self._firsts, self._lengths, strict=True))

    def of(self, epoch: int) -> int:
        """Batches in one epoch; infinity where nobody knows."""
        length: int = self._lengths[max(0, bisect_right(self._firsts, epoch) - 1)]
        return length

    def before(self, epoch: int) -> int:
        """Batches in all epochs before this one."""
        step = max(0, bisect_right(self._firsts, epoch) - 1)
        before: int = self._before[step] + (epoch - self._firsts[step]) * self._lengths[step]
        return before

    @property
    def even(self) -> bool:
        """All epochs are equally long."""
        return len(set(self._lengths)) == 1

    def updates_at(self, epochs: float) -> float:
        """Batches in so many epochs, the last of which may be a part of one."""
        whole = int(epochs)
        return self.before(whole + 1) + (epochs - whole) * self.of(whole + 1)

    def epochs_at(self, windows: float) -> float:
        """The reverse of :meth:`updates_at`."""
        epochs, rest = self.split(int(windows))
        return epochs + (rest + windows - int(windows)) / self.of(epochs + 1)

    def split(self, windows: int) -> tuple[int, int]:
        """So many batches as whole epochs, and batches of the next one."""
        step = bisect_right(self._before, windows) - 1
        epochs, rest = divmod(windows - self._before[step], self._lengths[step])
        return self._firsts[step] - 1 + epochs, rest
