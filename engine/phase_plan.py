"""The plan of a stage: how many updates it makes, when it tests, and when it is over.

It holds no state of its own: all state is in ``Progress``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phaseloop.engine import durations
from phaseloop.engine.epoch_lengths import EpochLengths
from phaseloop.engine.phases import Phases
from phaseloop.engine.progress import Progress


class Origin(NamedTuple):
    """Where a stage begins: what was done in the run before it."""

    epochs: int = 0
    updates: int = 0
    seconds: float = 0.0


class PhasePlan:
    """Decides what comes next in one stage.

    Args:
        phases: lengths and cadence.
        windows_per_epoch: batches in a training epoch, as :class:`EpochLengths` takes them, by
            the epochs of the whole run; 0 without training data.
        test_sets: names of the test sets, in order.
        origin: where in the run the stage begins; its lengths and cadence count from there.

    Attributes:
        lengths: batches in every epoch.
        known: it is known how long every epoch is.
        trains: there is training data.
        keeps_time: wall time has a say.
    """

    def __init__(
        self,
        phases: Phases,
        windows_per_epoch: int | Mapping[int, int | float],
        test_sets: Sequence[str],
        origin: Origin = Origin(),  # noqa: B008 it cannot be changed
    ) -> None:
        self.phases = phases
        self.lengths = EpochLengths(windows_per_epoch)
        self.trains = self.lengths.of(1) > 0
        self.test_sets = list(test_sets)
        self.origin = origin
        self.known = self.lengths.known
        self._before = self.lengths.before(origin.epochs + 1) if self.known else 0
        self._time = _seconds(phases.time)
        self._test_time = _seconds(phases.test_every_time)
        self.keeps_time = self._time is not None or self._test_time is not None
        every = phases.test_every_epochs
        self._within_epochs = every is not None and every != int(every)

    # --- how long it is ---

    def windows_in(self, epoch: int) -> int:
        """Batches in one training epoch; fewer in a last one of which a fraction is asked for.

        Infinity for a stream that does not say.
        """
        full = self.lengths.of(epoch)
        epochs = self.phases.epochs
        if self.known and epochs is not None and epoch - self.origin.epochs == math.ceil(epochs):
            return full - math.floor((math.ceil(epochs) - epochs) * full + _ROUNDING)
        return full

    def windows_of_epoch(self, progress: Progress) -> int:
        """Batches in the epoch at hand, as far as is known by now."""
        return progress.epoch_windows or self.windows_in(progress.epoch)

    @property
    def updates(self) -> int:
        """Updates planned for the stage; 0 where nobody knows: see :attr:`endless`."""
        if self.endless:
            return 0
        lengths = []
        epochs = self.phases.epochs
        if epochs is not None and self.known:
            last = self.origin.epochs + math.ceil(epochs)
            lengths.append(self._windows_before(last) + self.windows_in(last) if epochs else 0)
        if self.phases.updates is not None and self.trains:
            lengths.append(self.phases.updates)
        return min(lengths, default=0)

    @property
    def endless(self) -> bool:
        """How many updates it makes is not known before.

        Its length is a time, or there are epochs in it and nobody knows how long these are.
        """
        epochs, updates = self.phases.epochs is not None, self.phases.updates is not None
        return self.trains and not ((updates and not epochs) or (epochs and self.known))

    @property
    def why_endless(self) -> str:
        """Why that is, and what to do about it."""
        if self.known:
            return (
                "a time as the only length does not say how many there are; give phases.epochs or "
                "phases.updates too, or use constant"
            )
        return (
            "nobody knows how many there are: a pass through this stream may be of any length; "
            "give phases.updates as the only length beside a time, or use constant"
        )

    @property
    def epochs(self) -> float:
        """Epochs planned for the stage; a fraction where updates end in mid-epoch.

        Not a number where nobody knows how long an epoch is.
        """
        return self._epochs_of(self.updates)

    def epochs_after(self, updates: int) -> float:
        """So many updates of the run, in epochs of the stage; a fraction in mid-epoch."""
        return self._epochs_of(updates - self.origin.updates)

    def updates_at(self, epochs: float) -> float:
        """Updates in so many epochs of the stage."""
        return self.lengths.updates_at(self.origin.epochs + epochs) - self._before

    def epochs_at(self, updates: float) -> float:
        """The reverse of :meth:`updates_at`."""
        return self.lengths.epochs_at(self._before + updates) - self.origin.epochs

    def _epochs_of(self, updates: int) -> float:
        if not self.trains:
            return 0.0
        if not self.known:
            return math.nan
        epochs, rest = self.lengths.split(self._before + updates)
        length = self.lengths.of(epochs + 1)
        # Not epochs + rest / length: one division is right to the last bit.
        return ((epochs - self.origin.epochs) * length + rest) / length

    def _windows_before(self, epoch: int) -> int:
        return self.lengths.before(epoch) - self._before

    # --- where the run stands in it ---

    def updates_done(self, progress: Progress) -> int:
        """Updates made in the stage."""
        return progress.updates - self.origin.updates

    def epoch(self, progress: Progress) -> int:
        """Number of the current or last epoch in the stage, from 1; 0 before the first."""
        return progress.epoch - self.origin.epochs

    def train_is_over(self, progress: Progress) -> bool:
        """The length is reached: no further update is due."""
        if not self.trains or self.length_reached(progress):
            return True
        if progress.epoch_open or self.epoch_is_unfinished(progress):
            return False
        return self._epochs_are_over(progress)

    def is_over(self, progress: Progress) -> bool:
        """Nothing is left to do in the stage; one without updates may still test at its start."""
        return self.train_is_over(progress) and not self.test_due_at_start(progress)

    def length_reached(self, progress: Progress) -> bool:
        """No update may follow, in the middle of an epoch or at its end.

        Beyond the last epoch a run is only after it was made shorter.
        """
        epochs, updates, time = self.phases.epochs, self.phases.updates, self._time
        return (
            (updates is not None and progress.updates - self.origin.updates >= updates)
            or (epochs is not None and progress.epoch - self.origin.epochs > math.ceil(epochs))
            or (time is not None and progress.seconds - self.origin.seconds >= time)
        )

    def seconds_left(self, progress: Progress) -> float | None:
        """Seconds until the stage's time is over; None: no time is its length."""
        if self._time is None:
            return None
        return max(0.0, self._time - (progress.seconds - self.origin.seconds))

    def epoch_is_unfinished(self, progress: Progress) -> bool:
        """The train phase ended before its data did, since the run was planned shorter then."""
        return (
            progress.epoch > self.origin.epochs
            and not progress.ended_early
            and progress.windows < self.windows_of_epoch(progress)
        )

    def below_minimum(self, progress: Progress) -> bool:
        """A stop asked for now would come before the minimum length."""
        epochs = self.epoch(progress) - progress.epoch_open
        return (
            epochs < self.phases.min_epochs or self.updates_done(progress) < self.phases.min_updates
        )

    def _epochs_are_over(self, progress: Progress) -> bool:
        epochs = self.phases.epochs
        return epochs is not None and self.epoch(progress) >= epochs

    # --- when it tests ---

    @property
    def tests(self) -> bool:
        """A test comes at some time."""
        return bool(self.test_sets) and (self._has_cadence or self.phases.test_at_start)

    @property
    def _has_cadence(self) -> bool:
        phases = self.phases
        cadences = (phases.test_every_epochs, phases.test_every_updates, phases.test_every_time)
        return any(every is not None for every in cadences)

    def test_due_at_start(self, progress: Progress) -> bool:
        """A test is due before the stage's first update."""
        begun = progress.epoch > self.origin.epochs or progress.updates > self.origin.updates
        return self.phases.test_at_start and not begun and self._untested(progress)

    def test_due_in_epoch(self, progress: Progress) -> bool:
        """A test is due after the update just made, in the middle of an epoch."""
        every, done = self.phases.test_every_updates, progress.updates - self.origin.updates
        due = every is not None and done > 0 and done % every == 0
        if self._within_epochs:
            due = due or self._fraction_passed(progress)
        if self._test_time is not None:
            due = due or progress.seconds - progress.tested_seconds >= self._test_time
        return due and self._untested(progress)

    def test_due_at_epoch_end(self, progress: Progress) -> bool:
        """A test is due at the end of the epoch, before its phase-end hooks are called."""
        if not self._untested(progress):
            return False
        phases = self.phases
        if self.length_reached(progress) or self._epochs_are_over(progress):
            return self._has_cadence
        whole = None if self._within_epochs else phases.test_every_epochs
        if whole is not None and self.epoch(progress) % whole == 0:
            return True
        return self.test_due_in_epoch(progress)

    def _fraction_passed(self, progress: Progress) -> bool:
        """The window just done has reached the next n-th part of an epoch."""
        every = self.phases.test_every_epochs
        assert every is not None
        length = self.lengths.of(progress.epoch)  # known: see the check of the task
        done = self.epoch(progress) - 1 + progress.windows / length
        before = done - 1 / length
        return math.floor(done / every + _ROUNDING) > math.floor(before / every + _ROUNDING)

    def _untested(self, progress: Progress) -> bool:
        return bool(self.test_sets) and progress.tested_at != progress.updates


_ROUNDING = 1e-9  # .1 * 30 is a little more than 3


def _seconds(text: Any) -> float | None:
    return None if text is None else durations.seconds(text, "phases.time")
