"""Phases: how long a training is and when it tests, as a user says it; and one phase of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from phaseloop.engine import durations
from phaseloop.engine.errors import ConfigError

TRAIN = "train"

LENGTHS = ("epochs", "updates", "time")


@dataclass
class Phases:
    """Length of the training and cadence of the tests.

    Of several lengths, whichever is reached first ends the training. Several cadences may hold
    too; two tests that fall on the same update are one.

    Args:
        epochs: train this many epochs; 2.5 ends in the middle of the third.
        updates: train this many updates that count.
        time: train until so much wall time is spent, over all interruptions: ``90s``, ``1h 30m``.
        min_epochs: a stop asked for by a hook or step before this many epochs is dropped.
        min_updates: the same in updates.
        test_every_epochs: test after every n-th epoch and after the last; .25 is four times an
            epoch; None: not by epochs.
        test_every_updates: test after every n-th update and after the last.
        test_every_time: test at the first update after so much wall time, and after the last.
        test_at_start: test before the first update too.
    """

    epochs: int | float | None = None
    updates: int | None = None
    time: str | int | float | None = None  # a number has no unit, and is refused with that word
    min_epochs: int = 0
    min_updates: int = 0
    test_every_epochs: int | float | None = 1
    test_every_updates: int | None = None
    test_every_time: str | int | float | None = None
    test_at_start: bool = False

    def check(self, key: str = "phases") -> None:
        """Raises ConfigError when no length is given or a number is out of range."""
        least = {
            "epochs": 0,
            "updates": 0,
            "min_epochs": 0,
            "min_updates": 0,
            "test_every_updates": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"{key}.{name}", f"{value} is less than {bound}")
        for name in ("epochs", "updates"):
            least_wanted, length = getattr(self, f"min_{name}"), getattr(self, name)
            if length is not None and least_wanted > length:
                raise ConfigError(
                    f"{key}.min_{name}", f"{least_wanted} is more than {key}.{name}, {length}"
                )
        every = self.test_every_epochs
        if every is not None and not every > 0:
            raise ConfigError(f"{key}.test_every_epochs", f"{every} is not more than 0")
        for name in ("time", "test_every_time"):
            if getattr(self, name) is not None:
                durations.seconds(getattr(self, name), f"{key}.{name}")
        if all(getattr(self, name) is None for name in LENGTHS):
            raise ConfigError(f"{key}.epochs", f"give a length: {', '.join(LENGTHS)}")


@dataclass
class Phase:
    """One pass with one mode, one loader and one length.

    Attributes:
        name: ``train``, or the name of the test set; the prefix of its metrics.
        train: gradients are made and parameters change.
        epoch: number of the epoch that it belongs to, from 1.
        windows: batches that it is long; infinity for a stream until its last batch is done.
        position: batches done.
        fresh: ``on_phase_start`` has still to be called.
        ending: a test phase that a hook has ended early ends at the next border.
        done: its end was reached: the data is used up, or the training is long enough.
        metrics: at its end, metric name (``test/accuracy``) to value.
    """

    name: str
    train: bool
    epoch: int
    windows: int | float
    position: int = 0
    fresh: bool = True
    ending: bool = False
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
