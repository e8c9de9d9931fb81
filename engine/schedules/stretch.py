"""Stretch: the part of a training that a curve is for, and lengths on it in three units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from phaseloop.engine.errors import ConfigError

Unit = Literal["fraction", "updates", "epochs"]
UNITS = ("fraction", "updates", "epochs")

UNKNOWN_EPOCHS = (
    "it counts in epochs, and how long a pass through this stream is shows at its end; count in "
    "updates or fractions, or let the stream have a length"
)


class Calendar(Protocol):
    """Where epochs begin, when they are not all equally long."""

    def updates_at(self, epochs: float) -> float:
        """Updates made after so many epochs."""

    def epochs_at(self, updates: float) -> float:
        """Epochs done after so many updates."""


@dataclass(frozen=True)
class Stretch:
    """The part of a training that a curve is for: all of it, what follows a warm-up, or a part.

    Args:
        updates, epochs: how long it is; epochs that are not a number: nobody knows.
        updates_before, epochs_before: how much of the training lies before it.
        calendar: for epochs of different lengths; None: all are equally long.
    """

    updates: float
    epochs: float
    updates_before: float = 0.0
    epochs_before: float = 0.0
    calendar: Calendar | None = None

    def place(self, position: float, unit: Unit) -> float:
        """A position as ``where`` on this stretch: 0 is its start, 1 its end.

        Updates and epochs are counted from the training's start: a milestone at epoch 30 is there
        with a warm-up and without. A fraction is one of this stretch.
        """
        if unit == "fraction":
            return position
        if unit == "epochs" and math.isnan(self.epochs):
            raise ConfigError("schedule", UNKNOWN_EPOCHS)
        if unit == "epochs" and self.calendar is None:
            return (position - self.epochs_before) / self.epochs
        if unit == "epochs" and self.calendar is not None:
            position = self.calendar.updates_at(position)
        return (position - self.updates_before) / self.updates

    def part(self, start: float, share: float) -> Stretch:
        """The part that begins at ``start`` and is ``share`` long, both fractions of this."""
        updates, updates_before = self.updates * share, self.updates_before + self.updates * start
        if self.calendar is None:
            epochs, epochs_before = self.epochs * share, self.epochs_before + self.epochs * start
        else:
            epochs_before = self.calendar.epochs_at(updates_before)
            epochs = self.calendar.epochs_at(updates_before + updates) - epochs_before
        return Stretch(updates, epochs, updates_before, epochs_before, self.calendar)


def check_unit(unit: str) -> None:
    """Raises ConfigError for a unit that there is not."""
    if unit not in UNITS:
        raise ConfigError("schedule.unit", f"{unit!r} is not one of {', '.join(UNITS)}")


def shares(lengths: Sequence[float | None], unit: Unit, stretch: Stretch) -> list[float]:
    """Lengths of parts as fractions of a stretch, which they fill.

    Args:
        lengths: one for each part; in updates and epochs the last may be None: the rest.

    Raises:
        ConfigError: they do not fill it, or one has no length.
    """
    if None in lengths[:-1] or (unit == "fraction" and None in lengths):
        raise ConfigError(
            "schedule.lengths",
            f"{list(lengths)}: only the last, in updates or epochs, may be null, the rest",
        )
    if unit == "fraction":
        return [length for length in lengths if length is not None]
    position = stretch.updates_before if unit == "updates" else stretch.epochs_before
    borders = [0.0]
    for length in lengths:
        position += length or 0.0
        borders.append(1.0 if length is None else stretch.place(position, unit))
    fractions = [b - a for a, b in pairwise(borders)]
    if min(fractions) <= 0 or abs(borders[-1] - 1) > 1e-9:
        whole = stretch.updates if unit == "updates" else stretch.epochs
        raise ConfigError(
            "schedule.lengths",
            f"{list(lengths)} {unit} do not fill the {whole:g} {unit} that this schedule is for; "
            f"null as the last is the rest",
        )
    return fractions
