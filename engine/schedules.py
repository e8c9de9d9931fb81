"""Schedules: options of an optimizer's groups as functions of progress.

A schedule is a pure function of ``where`` in [0, 1): it has no state, so nothing of it can be
lost. The curves are fvcore's ``ParamScheduler``s (fvcore/common/param_scheduler.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
)
from torch.optim import Optimizer

from phaseloop.engine.errors import ConfigError, RegistryError
from phaseloop.engine.registry import register_schedule, schedules

Build = Callable[[float], ParamScheduler]


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

    def share(self, updates: int, epochs: float, key: str = "schedule.warmup") -> float:
        """Its length as a fraction of the whole.

        Raises:
            ConfigError: none or several lengths are given, or it is longer than the training.
        """
        given = {
            "updates": None if self.updates is None else self.updates / max(updates, 1),
            "epochs": None if self.epochs is None else self.epochs / max(epochs, 1e-12),
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
                f"{getattr(self, name)} is {share:.3g} of the training of {updates} updates "
                f"({epochs:g} epochs); it must be at least 0 and less than all of it",
            )
        return share


class Schedule:
    """One option of every parameter group as a function of progress.

    Args:
        build: from a group's own value of the option (its base) to the curve.
        option: the group's key, such as ``lr``, ``momentum`` or ``weight_decay``.
        warmup: a linear rise before the curve.
        interval: ``update``: a new value each update; ``epoch``: each epoch.

    Raises:
        ConfigError: another interval.
    """

    def __init__(
        self,
        build: Build,
        *,
        option: str = "lr",
        warmup: Warmup | None = None,
        interval: str = "update",
    ) -> None:
        if interval not in ("update", "epoch"):
            raise ConfigError("schedule.interval", f"{interval!r} is not 'update' or 'epoch'")
        self.option = option
        self.interval = interval
        self._build = build
        self._warmup = warmup
        self._curves: dict[float, ParamScheduler] = {}
        self._updates = 0
        self._epochs = 0.0

    def plan(self, updates: int, epochs: float) -> None:
        """Spread the schedule over this many updates and epochs.

        Raises:
            ConfigError: the warm-up does not fit into them.
        """
        self._updates, self._epochs = updates, epochs
        self._curves = {}
        if self._warmup is not None and updates:  # now, and not at the first update
            self._warmup.share(updates, epochs)

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
        if self.interval == "update":
            where = updates_done / self._updates
        else:
            where = epochs_done / self._epochs
        return float(curve(min(where, _BELOW_ONE)))

    def _curve(self, base: float) -> ParamScheduler:
        main = self._build(base)
        if self._warmup is None:
            return main
        share = self._warmup.share(self._updates, self._epochs)
        if share == 0:
            return main
        rise = LinearParamScheduler(self._warmup.start, main(0.0))
        return Joined([rise, main], [share, 1 - share])


_BELOW_ONE = math.nextafter(1.0, 0.0)


class Joined(ParamScheduler):  # type: ignore[misc]
    """Curves one after the other, each over its own length, each seeing its own 0 to 1.

    fvcore's composite begins a part 1e-6 early, which is many updates of a long training; here a
    part begins at the first update that is not before its border, up to rounding.

    Args:
        parts: the curves.
        lengths: their lengths as fractions, which add up to 1.
    """

    def __init__(self, parts: Sequence[ParamScheduler], lengths: Sequence[float]) -> None:
        if len(parts) != len(lengths) or not parts:
            raise ConfigError("schedule.lengths", "give one length for each of the parts")
        if not math.isclose(sum(lengths), 1.0, abs_tol=1e-9) or min(lengths) <= 0:
            raise ConfigError(
                "schedule.lengths", f"{list(lengths)} must be positive and add up to 1"
            )
        self._parts = list(parts)
        self._lengths = list(lengths)

    def __call__(self, where: float) -> float:
        start = 0.0
        for part, length in zip(self._parts[:-1], self._lengths[:-1], strict=True):
            if where < start + length - 1e-12:
                return float(part((where - start) / length))
            start += length
        inside = max(0.0, (where - start) / self._lengths[-1])
        return float(self._parts[-1](min(inside, _BELOW_ONE)))


class Rates:
    """Applies schedules to an optimizer's groups.

    A group's base value is the one that the optimizer was made with; it is kept in the group
    under ``base_<option>``, so that it is in every checkpoint.

    Args:
        optimizer: whose groups.
        plan: the schedules; each for another option.

    Raises:
        ConfigError: no group has the option of a schedule, or two schedules set the same one.
    """

    def __init__(self, optimizer: Optimizer, plan: Sequence[Schedule]) -> None:
        self.optimizer = optimizer
        self.schedules = list(plan)
        self.were_set = False
        options = [schedule.option for schedule in self.schedules]
        if len(set(options)) != len(options):
            raise ConfigError("schedule", f"two schedules set the same option: {options}")
        for option in options:
            for group in optimizer.param_groups:
                if option not in group:
                    raise ConfigError(
                        "schedule.option",
                        f"{type(optimizer).__name__} has no option {option!r}; "
                        f"its groups have {sorted(set(group) - {'params'})}",
                    )
                group.setdefault(f"base_{option}", float(group[option]))

    def set(self, updates_done: int, epochs_done: int) -> None:
        """Set every scheduled option for the next update."""
        self.were_set = True
        for schedule in self.schedules:
            option = schedule.option
            base_key = f"base_{option}"
            last_base, value = None, 0.0
            for group in self.optimizer.param_groups:
                base = group[base_key]
                if base != last_base:
                    last_base, value = base, schedule.value(base, updates_done, epochs_done)
                group[option] = value


# --- the curves by name. Each takes the group's base value and gives an fvcore scheduler. ---


@register_schedule("constant")
def constant() -> Build:
    """The base value, always."""
    return lambda base: ConstantParamScheduler(base)


@register_schedule("linear")
def linear(start: float | None = None, end: float = 0.0) -> Build:
    """From ``start`` (the base value) to ``end``: start + (end - start) * where."""
    return lambda base: LinearParamScheduler(base if start is None else start, end)


@register_schedule("cosine")
def cosine(start: float | None = None, end: float = 0.0) -> Build:
    """Half a cosine: end + (start - end) * (1 + cos(pi * where)) / 2.

    Source: Loshchilov, Hutter, "SGDR", ICLR 2017, without restarts.
    """
    return lambda base: CosineParamScheduler(base if start is None else start, end)


@register_schedule("multi_step")
def multi_step(
    milestones: list[float], factors: list[float] | None = None, gamma: float = 0.1
) -> Build:
    """The base value times a factor that changes at each milestone.

    Args:
        milestones: fractions of the training in (0, 1), ascending.
        factors: factor after each milestone; default: gamma, gamma**2, ...
        gamma: used where factors are not given.
    """
    if sorted(set(milestones)) != list(milestones) or not all(0 < m < 1 for m in milestones):
        raise ConfigError(
            "schedule.milestones", f"{milestones} must be ascending fractions between 0 and 1"
        )
    after = [gamma ** (i + 1) for i in range(len(milestones))] if factors is None else factors
    if len(after) != len(milestones):
        raise ConfigError("schedule.factors", f"give {len(milestones)}, one per milestone")
    lengths = [b - a for a, b in zip([0.0, *milestones], [*milestones, 1.0], strict=True)]

    def build(base: float) -> ParamScheduler:
        steps = [ConstantParamScheduler(base * factor) for factor in [1.0, *after]]
        return Joined(steps, lengths)

    return build


@register_schedule("step")
def step(steps: int, gamma: float = 0.1) -> Build:
    """The base value times ``gamma`` after each of ``steps`` equal parts of the training."""
    if steps < 1:
        raise ConfigError("schedule.steps", f"{steps} is less than 1")
    return multi_step([i / steps for i in range(1, steps)], gamma=gamma)


@register_schedule("polynomial")
def polynomial(power: float) -> Build:
    """base * (1 - where) ** power."""
    return lambda base: PolynomialDecayParamScheduler(base, power)


@register_schedule("exponential")
def exponential(decay: float) -> Build:
    """base * decay ** where: ``decay`` times the base value at the end."""
    return lambda base: ExponentialParamScheduler(base, decay)


@register_schedule("composite")
def composite(parts: list[Mapping[str, Any]], lengths: list[float]) -> Build:
    """Curves one after the other.

    Args:
        parts: each a mapping ``{name: ..., options}`` of a registered schedule.
        lengths: fractions of the training, which add up to 1.
    """
    builds: list[Build] = []
    for number, part in enumerate(parts):
        options = {k: v for k, v in part.items() if k != "name"}
        if "name" not in part:
            raise ConfigError(f"schedule.parts.{number}.name", "give the name of a schedule")
        builds.append(_part(f"schedule.parts.{number}", part["name"], options))
    Joined([ConstantParamScheduler(0.0)] * len(builds), lengths)  # checks the lengths
    return lambda base: Joined([build(base) for build in builds], lengths)


def _part(key: str, name: str, options: Mapping[str, Any]) -> Build:
    try:
        make = schedules.get(name).target
        inspect.signature(make).bind(**options)
    except (RegistryError, TypeError) as error:
        raise ConfigError(key, f"{name}: {error}") from None
    build: Build = make(**options)
    return build
