"""Schedules: options of an optimizer's groups as functions of progress.

A schedule is a pure function of ``where`` in [0, 1): it has no state, so nothing of it can be
lost. The curves are fvcore's ``ParamScheduler``s (fvcore/common/param_scheduler.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fvcore.common.param_scheduler import LinearParamScheduler, ParamScheduler

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.facts import fact_of, name_of
from phaseloop.engine.schedules import curves
from phaseloop.engine.schedules.batch_scale import ScaleWithBatch
from phaseloop.engine.schedules.curves import Build
from phaseloop.engine.schedules.joined import BELOW_ONE, Joined
from phaseloop.engine.schedules.stretch import UNKNOWN_EPOCHS, Calendar, Stretch


@dataclass
class Warmup:
    """A linear rise at the start of a schedule, which then runs over the rest.

    Args:
        start: the value of the first update.
        updates, epochs, fraction: how long; give exactly one.
    """

    start: float = 0.0
    updates: int | None = None
    epochs: float | None = None
    fraction: float | None = None

    def share(self, whole: Stretch, key: str = "schedule.warmup") -> float:
        """Its length as a fraction of the whole.

        Raises:
            ConfigError: none or several lengths are given, or it is longer than the training.
        """
        given = {
            "updates": None if self.updates is None else whole.place(self.updates, "updates"),
            "epochs": None if self.epochs is None else whole.place(self.epochs, "epochs"),
            "fraction": self.fraction,
        }
        lengths = {name: value for name, value in given.items() if value is not None}
        if len(lengths) != 1:
            got = ", ".join(lengths) or "none"
            raise ConfigError(key, f"give exactly one of updates, epochs, fraction; got {got}")
        ((name, share),) = lengths.items()
        if not 0 <= share < 1:
            raise ConfigError(
                f"{key}.{name}",
                f"{getattr(self, name)} is {share:.3g} of the training of {whole.updates} updates "
                f"({whole.epochs:g} epochs); it must be at least 0 and less than all of it",
            )
        return share


class Schedule:
    """One option of parameter groups as a function of progress.

    Args:
        build: from a group's own value of the option (its base) and the stretch of the training
            to the curve.
        option: the groups' key, such as ``lr``, ``momentum`` (the first of ``betas``, where an
            optimizer has those) or ``weight_decay``.
        warmup: a linear rise before the curve.
        interval: ``update``: a new value each update; ``epoch``: each epoch.
        groups: names of the parameter groups that it is for; None: all.
        scale_with_batch: for ``lr``: multiply the base by what the batch size asks for.
        key: where it stands in the configuration, for messages.

    Raises:
        ConfigError: another interval, or a batch scale for another option.
    """

    def __init__(
        self,
        build: Build,
        *,
        option: str = "lr",
        warmup: Warmup | None = None,
        interval: str = "update",
        groups: Sequence[str] | None = None,
        scale_with_batch: ScaleWithBatch | None = None,
        key: str = "schedule",
    ) -> None:
        if interval not in ("update", "epoch"):
            raise ConfigError(f"{key}.interval", f"{interval!r} is not 'update' or 'epoch'")
        if scale_with_batch is not None and option != "lr":
            raise ConfigError(f"{key}.scale_with_batch", f"is for the option lr, not {option}")
        self.option = option
        self.interval = interval
        self.groups = None if groups is None else list(groups)
        self.scale_with_batch = scale_with_batch
        self.key = key
        self._build = build
        self._warmup = warmup
        self._curves: dict[float, ParamScheduler] = {}
        self._updates = 0
        self._epochs = 0.0
        self._calendar: Calendar | None = None

    def plan(self, updates: int, epochs: float, calendar: Calendar | None = None) -> None:
        """Spread the schedule over this many updates and epochs.

        Args:
            epochs: not a number where nobody knows how long one is.
            calendar: where epochs begin, when they are not all equally long.

        Raises:
            ConfigError: its warm-up or its parts do not fit into them, or
                ``scale_with_batch`` has no base value to scale.
        """
        if self.interval == "epoch" and math.isnan(epochs) and updates:
            raise ConfigError(f"{self.key}.interval", UNKNOWN_EPOCHS)
        self._updates, self._epochs = updates, epochs
        self._calendar = calendar if self.interval == "update" else None
        self._curves = {}
        if updates:  # checked now, and not at the first update
            one = self._curve(1.0)
            if self.scale_with_batch is not None:
                two = self._curve(2.0)
                if all(one(at / 8) == two(at / 8) for at in range(8)):
                    raise ConfigError(
                        f"{self.key}.scale_with_batch",
                        "the curve gives the values themselves (start): no base value is scaled",
                    )

    def check_endless(self, why: str) -> None:
        """Raises ConfigError where the curve has to be spread over a length, and there is none.

        Args:
            why: there is none.
        """
        if self._warmup is not None or not getattr(self._build, "endless", False):
            raise ConfigError(self.key, f"it is spread over the planned updates, and {why}")

    def value(self, base: float, updates_done: int, epochs_done: int) -> float:
        """The value for the next update.

        Args:
            base: the group's own value of the option, as the optimizer was made.
            updates_done: updates made: update k of N uses where = (k - 1) / N.
            epochs_done: epochs completed; used with ``interval="epoch"``.
        """
        curve = self._curves.get(base)
        if curve is None:
            curve = self._curves[base] = self._curve(base)
        if not self._updates:
            where = 0.0
        elif self.interval == "update":
            where = updates_done / self._updates
        else:
            where = epochs_done / self._epochs
        return float(curve(min(where, BELOW_ONE)))

    @property
    def rise(self) -> float:
        """Updates of its warm-up, as planned; 0: it has none."""
        if self._warmup is None or not self._updates:
            return 0.0
        with keyed(self.key):
            whole = Stretch(self._updates, self._epochs, calendar=self._calendar)
            return self._warmup.share(whole) * self._updates

    def facts(self) -> dict[str, Any]:
        """What makes this schedule the one it is, as plain Python."""
        return {
            "curve": _curve_facts(self._build),
            "option": self.option,
            "interval": self.interval,
            "warmup": fact_of(self._warmup),
            "groups": self.groups,
            "scale_with_batch": fact_of(self.scale_with_batch),
        }

    def _curve(self, base: float) -> ParamScheduler:
        with keyed(self.key):
            whole = Stretch(self._updates, self._epochs, calendar=self._calendar)
            if self._warmup is None:
                return self._build(base, whole)
            share = self._warmup.share(whole)
            if share == 0:
                return self._build(base, whole)
            main = self._build(base, whole.part(share, 1 - share))
            rise = LinearParamScheduler(self._warmup.start, main(0.0))
            return Joined([rise, main], [share, 1 - share])


@contextmanager
def keyed(key: str) -> Iterator[None]:
    """Errors about ``schedule...`` are about ``key...``: a curve does not know where it stands."""
    try:
        yield
    except ConfigError as error:
        knows = error.key == key or error.key.startswith(f"{key}.")
        if knows or not error.key.startswith("schedule"):
            raise
        problem = str(error)[len(error.key) + 2 :]
        raise ConfigError(key + error.key.removeprefix("schedule"), problem) from None


def _curve_facts(build: Build) -> dict[str, Any]:
    """A curve's kind and, of those by name, its options, which its function encloses."""
    if getattr(build, "endless", False):
        return {"kind": "constant"}
    if not inspect.isfunction(build) or build.__module__ != curves.__name__:
        return {"kind": name_of(build)}
    options = {
        key: [_curve_facts(one) for one in value] if key == "builds" else fact_of(value)
        for key, value in inspect.getclosurevars(build).nonlocals.items()
        if key != "told"  # which warnings were given
    }
    return {"kind": build.__qualname__.split(".")[0], **options}
