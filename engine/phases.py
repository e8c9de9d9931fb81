"""Phases: how long a run is, when it tests, and which phase comes next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.progress import Progress

TRAIN = "train"


@dataclass
class Phases:
    """Length of the training and cadence of the tests.

    Args:
        epochs: train this many epochs.
        updates: train this many updates that count. With both, whichever comes first.
        min_epochs: a stop asked for by a hook or step before this many epochs is dropped.
        min_updates: the same in updates.
        test_every_epochs: test after every n-th epoch and after the last; None: not by epochs.
        test_every_updates: test after every n-th update and after the last. Both may be given;
            two that fall on the same update make one test.
    """

    epochs: int | None = None
    updates: int | None = None
    min_epochs: int = 0
    min_updates: int = 0
    test_every_epochs: int | None = 1
    test_every_updates: int | None = None

    def check(self, key: str = "phases") -> None:
        """Raises ConfigError when no length is given or a number is out of range."""
        least = {
            "epochs": 0,
            "updates": 0,
            "min_epochs": 0,
            "min_updates": 0,
            "test_every_epochs": 1,
            "test_every_updates": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{key}.{name}", f"{value} is less than {bound}")
        if self.epochs is None and self.updates is None:
            raise ConfigError(f"{key}.epochs", "give a length: epochs or updates")


@dataclass
class Phase:
    """One pass with one mode, one loader and one length.

    Attributes:
        name: ``train``, or the name of the test set; the prefix of its metrics.
        train: gradients are made and parameters change.
        epoch: number of the epoch that it belongs to, from 1.
        windows: batches that it is long.
        position: batches done.
        fresh: ``on_phase_start`` has still to be called.
        done: its end was reached: the data is used up, or the training is long enough.
        metrics: at its end, metric name (``test/accuracy``) to value.
    """

    name: str
    train: bool
    epoch: int
    windows: int
    position: int = 0
    fresh: bool = True
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


class EpochLengths:
    """Batches in each training epoch.

    Args:
        given: the same number for all, or a mapping from an epoch to the number from there on,
            which begins with epoch 1.

    Attributes:
        steps: the same, as plain Python.
    """

    def __init__(self, given: int | Mapping[int, int]) -> None:
        steps = {1: given} if isinstance(given, int) else dict(sorted(given.items()))
        self.steps = steps if len(steps) > 1 else steps[1]
        self._firsts, self._lengths = list(steps), list(steps.values())
        # Windows before each of these epochs.
        self._before = [0]
        for (a, b), length in zip(pairwise(self._firsts), self._lengths, strict=False):
            self._before.append(self._before[-1] + (b - a) * length)

    def of(self, epoch: int) -> int:
        """Batches in one epoch."""
        return self._lengths[max(0, bisect_right(self._firsts, epoch) - 1)]

    def before(self, epoch: int) -> int:
        """Batches in all epochs before this one."""
        step = max(0, bisect_right(self._firsts, epoch) - 1)
        return self._before[step] + (epoch - self._firsts[step]) * self._lengths[step]

    def split(self, windows: int) -> tuple[int, int]:
        """So many batches as whole epochs, and batches of the next one."""
        step = bisect_right(self._before, windows) - 1
        epochs, rest = divmod(windows - self._before[step], self._lengths[step])
        return self._firsts[step] - 1 + epochs, rest


class PhasePlan:
    """Decides what comes next. It holds no state of its own: all state is in ``Progress``.

    Args:
        phases: lengths and cadence.
        windows_per_epoch: batches in a training epoch, as :class:`EpochLengths` takes them; 0
            without training data.
        test_sets: names of the test sets, in order.

    Attributes:
        windows_per_epoch: batches in the first epoch.
        lengths: batches in every epoch.
    """

    def __init__(
        self, phases: Phases, windows_per_epoch: int | Mapping[int, int], test_sets: list[str]
    ) -> None:
        self.phases = phases
        self.lengths = EpochLengths(windows_per_epoch)
        self.windows_per_epoch = self.lengths.of(1)
        self.test_sets = test_sets

    def windows_in(self, epoch: int) -> int:
        """Batches in one training epoch."""
        return self.lengths.of(epoch)

    @property
    def updates(self) -> int:
        """Updates planned for the whole run."""
        by_epochs = self.lengths.before((self.phases.epochs or 0) + 1)
        lengths = [by_epochs] if self.phases.epochs is not None else []
        if self.phases.updates is not None and self.windows_per_epoch:
            lengths.append(self.phases.updates)
        return min(lengths, default=0)

    @property
    def epochs(self) -> float:
        """Epochs planned for the whole run; a fraction where updates end in mid-epoch."""
        return self.epochs_after(self.updates)

    def epochs_after(self, updates: int) -> float:
        """So many updates in epochs; a fraction in mid-epoch."""
        if not self.windows_per_epoch:
            return 0.0
        epochs, rest = self.lengths.split(updates)
        length = self.lengths.of(epochs + 1)
        return (epochs * length + rest) / length

    def train_is_over(self, progress: Progress) -> bool:
        """The length is reached: no further update is due."""
        if not self.windows_per_epoch or self.length_reached(progress):
            return True
        if progress.epoch_open or self.epoch_is_unfinished(progress):
            return False
        return self.phases.epochs is not None and progress.epoch >= self.phases.epochs

    def length_reached(self, progress: Progress) -> bool:
        """No update may follow, in the middle of an epoch or at its end.

        Beyond the last epoch a run is only after it was made shorter.
        """
        epochs, updates = self.phases.epochs, self.phases.updates
        return (updates is not None and progress.updates >= updates) or (
            epochs is not None and progress.epoch > epochs
        )

    def epoch_is_unfinished(self, progress: Progress) -> bool:
        """The train phase ended before its data did, since the run was planned shorter then."""
        return progress.epoch > 0 and progress.windows < self.windows_in(progress.epoch)

    def test_due_in_epoch(self, progress: Progress) -> bool:
        """A test is due after the update just made, in the middle of an epoch."""
        every = self.phases.test_every_updates
        return every is not None and progress.updates % every == 0 and self._untested(progress)

    def test_due_at_epoch_end(self, progress: Progress) -> bool:
        """A test is due at the end of the epoch, before its phase-end hooks are called."""
        if not self._untested(progress):
            return False
        over = self.length_reached(progress) or (
            self.phases.epochs is not None and progress.epoch >= self.phases.epochs
        )
        by_epochs = self.phases.test_every_epochs
        if by_epochs and (over or progress.epoch % by_epochs == 0):
            return True
        by_updates = self.phases.test_every_updates
        return by_updates is not None and (over or progress.updates % by_updates == 0)

    def below_minimum(self, progress: Progress) -> bool:
        """A stop asked for now would come before the minimum length."""
        epochs = progress.epoch - progress.epoch_open
        return epochs < self.phases.min_epochs or progress.updates < self.phases.min_updates

    def _untested(self, progress: Progress) -> bool:
        return bool(self.test_sets) and progress.tested_at != progress.updates

    def describe(self) -> dict[str, Any]:
        """The plan in numbers, for ``plan=true`` and the console's header."""
        return {
            "updates": self.updates,
            "epochs": self.epochs,
            "updates per epoch": self.lengths.steps,
            "test sets": self.test_sets,
        }
