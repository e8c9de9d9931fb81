"""Stretch: the part of a training that a curve is for, and lengths on it in three units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phaseloop.engine.errors import ConfigError

Unit = Literal["fraction", "updates", "epochs"]
UNITS = ("fraction", "updates", "epochs")


@dataclass(frozen=True)
class Stretch:
    """The part of a training that a curve is for: all of it, what follows a warm-up, or a part.

    Args:
        updates, epochs: how long it is.
        updates_before, epochs_before: how much of the training lies before it.
    """

    updates: float
    epochs: float
    updates_before: float = 0.0
    epochs_before: float = 0.0

    def share(self, length: float, unit: Unit) -> float:
        """A length as a fraction of this stretch."""
        return length if unit == "fraction" else length / self._whole(unit)

    def place(self, position: float, unit: Unit) -> float:
        """A position as ``where`` on this stretch: 0 is its start, 1 its end.

        Updates and epochs are counted from the training's start: a milestone at epoch 30 is there
        with a warm-up and without. A fraction is one of this stretch.
        """
        if unit == "fraction":
            return position
        before = self.updates_before if unit == "updates" else self.epochs_before
        return (position - before) / self._whole(unit)

    def part(self, start: float, share: float) -> Stretch:
        """The part that begins at ``start`` and is ``share`` long, both fractions of this."""
        return Stretch(
            self.updates * share,
            self.epochs * share,
            self.updates_before + self.updates * start,
            self.epochs_before + self.epochs * start,
        )

    def _whole(self, unit: Unit) -> float:
        return self.updates if unit == "updates" else self.epochs


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
    known = [stretch.share(length, unit) for length in lengths if length is not None]
    if None in lengths[:-1] or (unit == "fraction" and None in lengths):
        raise ConfigError(
            "schedule.lengths",
            f"{list(lengths)}: only the last, in updates or epochs, may be null, the rest",
        )
    if len(known) < len(lengths):
        known.append(1.0 - sum(known))
    if unit != "fraction" and (min(known) <= 0 or abs(sum(known) - 1) > 1e-9):
        whole = stretch.updates if unit == "updates" else stretch.epochs
        raise ConfigError(
            "schedule.lengths",
            f"{list(lengths)} {unit} do not fill the {whole:g} {unit} that this schedule is for; "
            f"null as the last is the rest",
        )
    return known
