"""The curves by name.

Each function takes a curve's options and gives what builds it: a function of the group's base value
and of the :class:`Stretch` of the training that the curve is for.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any

from fvcore.common.param_scheduler import (
    ConstantParamScheduler,
    CosineParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    ParamScheduler,
    PolynomialDecayParamScheduler,
)

from phaseloop.engine.errors import ConfigError, RegistryError
from phaseloop.engine.log_file import ALIKE
from phaseloop.engine.registry import register_schedule, schedules
from phaseloop.engine.schedules.joined import Joined
from phaseloop.engine.schedules.stretch import Stretch, Unit, check_unit, shares

log = logging.getLogger("phaseloop")

Build = Callable[[float, Stretch], ParamScheduler]


class _Endless:
    """A build of a curve that needs no length to be spread over."""

    endless = True

    def __call__(self, base: float, stretch: Stretch) -> ParamScheduler:
        return ConstantParamScheduler(base)


@register_schedule("constant")
def constant() -> Build:
    """The base value, always."""

    return _Endless()


@register_schedule("linear")
def linear(start: float | None = None, end: float = 0.0) -> Build:
    """From ``start`` (the base value) to ``end``: start + (end - start) * where."""
    return lambda base, stretch: LinearParamScheduler(base if start is None else start, end)


@register_schedule("cosine")
def cosine(start: float | None = None, end: float = 0.0) -> Build:
    """Half a cosine: end + (start - end) * (1 + cos(pi * where)) / 2.

    Source: Loshchilov, Hutter, "SGDR", ICLR 2017, without restarts.
    """
    return lambda base, stretch: CosineParamScheduler(base if start is None else start, end)


@register_schedule("cosine_restarts")
def cosine_restarts(
    cycles: int,
    growth: float = 1.0,
    decay: float = 1.0,
    start: float | None = None,
    end: float = 0.0,
) -> Build:
    """Half a cosine ``cycles`` times: the i-th from end + (start - end) * decay ** i to ``end``.

    Source: Loshchilov, Hutter, "SGDR", ICLR 2017.

    Args:
        cycles: how many, at least 1.
        growth: each cycle is so many times as long as the one before (there: T_mult).
        decay: each cycle begins so many times as high above ``end`` as the one before.
        start: where the first begins; default: the base value.
        end: where each ends.
    """
    if cycles < 1:
        raise ConfigError("schedule.cycles", f"{cycles} is less than 1")
    if growth <= 0:
        raise ConfigError("schedule.growth", f"{growth} is not above 0")
    if decay < 0:
        raise ConfigError("schedule.decay", f"{decay} is less than 0")
    grown = [growth**i for i in range(cycles)]
    lengths = [length / sum(grown) for length in grown]

    def build(base: float, stretch: Stretch) -> ParamScheduler:
        height = (base if start is None else start) - end
        tops = [end + height * decay**i for i in range(cycles)]
        return Joined([CosineParamScheduler(top, end) for top in tops], lengths)

    return build


@register_schedule("multi_step")
def multi_step(
    milestones: list[float],
    factors: list[float] | None = None,
    gamma: float = 0.1,
    unit: Unit = "fraction",
) -> Build:
    """The base value times a factor that changes at each milestone.

    Args:
        milestones: positions in the training, ascending.
        factors: factor after each milestone; default: gamma, gamma**2, ...
        gamma: used where factors are not given.
        unit: of the milestones: ``fraction``, in (0, 1), of what follows the warm-up; or
            ``updates`` or ``epochs`` from the training's start.
    """
    check_unit(unit)
    below = 1 if unit == "fraction" else math.inf
    if sorted(set(milestones)) != list(milestones) or not all(0 < m < below for m in milestones):
        among = "fractions between 0 and 1" if unit == "fraction" else f"{unit} above 0"
        raise ConfigError("schedule.milestones", f"{milestones} must be ascending {among}")
    after = [gamma ** (i + 1) for i in range(len(milestones))] if factors is None else factors
    if len(after) != len(milestones):
        raise ConfigError("schedule.factors", f"give {len(milestones)}, one per milestone")

    told: set[int] = set()

    def build(base: float, stretch: Stretch) -> ParamScheduler:
        places = _reached(milestones, unit, stretch, told)
        lengths = [b - a for a, b in zip([0.0, *places], [*places, 1.0], strict=True)]
        steps = [ConstantParamScheduler(base * factor) for factor in [1.0, *after]]
        return Joined(steps[: len(lengths)], lengths)

    return build


def _reached(milestones: list[float], unit: Unit, stretch: Stretch, told: set[int]) -> list[float]:
    """The milestones that the training reaches, as ``where`` on the stretch.

    Later ones are no mistake, as a run may be made shorter; but they are not dropped in silence.

    Args:
        told: how many were kept where a warning was given; each group asks for its own curve.
    """
    places = [stretch.place(milestone, unit) for milestone in milestones]
    if places and places[0] <= 0:
        raise ConfigError(
            "schedule.milestones", f"{milestones[0]:g} {unit} is not after the curve's start"
        )
    kept = [place for place in places if place < 1 - 1e-12]
    if len(kept) < len(places) and len(kept) not in told:
        told.add(len(kept))
        log.warning(
            "the training ends before these milestones of its schedule: %s %s",
            ", ".join(f"{m:g}" for m in milestones[len(kept) :]),
            unit,
            extra=ALIKE,
        )
    return kept


@register_schedule("step")
def step(
    steps: int | None = None,
    every: float | None = None,
    gamma: float = 0.1,
    unit: Unit = "fraction",
) -> Build:
    """The base value times ``gamma`` again and again, at equal distances.

    Args:
        steps: after each of so many equal parts of the training; or
        every: after each stretch of this length, in ``unit``.
        gamma: the factor.
        unit: of ``every``: ``fraction``, of what follows the warm-up; or ``updates`` or
            ``epochs`` from the training's start.
    """
    check_unit(unit)
    if (steps is None) == (every is None):
        raise ConfigError("schedule.steps", "give exactly one of steps and every")
    if steps is not None:
        if steps < 1:
            raise ConfigError("schedule.steps", f"{steps} is less than 1")
        if unit != "fraction":
            raise ConfigError("schedule.unit", f"{unit!r} is for every; steps is a number of parts")
        return multi_step([i / steps for i in range(1, steps)], gamma=gamma)
    assert every is not None
    if every <= 0:
        raise ConfigError("schedule.every", f"{every} is not above 0")

    def build(base: float, stretch: Stretch) -> ParamScheduler:
        made = 0  # steps that fall into the warm-up
        while stretch.place(every * (made + 1), unit) <= 1e-12:
            made += 1
        edges = [0.0]
        while (place := stretch.place(every * (made + len(edges)), unit)) < 1 - 1e-12:
            edges.append(place)
        lengths = [b - a for a, b in pairwise([*edges, 1.0])]
        steps = [ConstantParamScheduler(base * gamma ** (made + i)) for i in range(len(edges))]
        return Joined(steps, lengths)

    return build


@register_schedule("polynomial")
def polynomial(power: float) -> Build:
    """base * (1 - where) ** power."""
    return lambda base, stretch: PolynomialDecayParamScheduler(base, power)


@register_schedule("exponential")
def exponential(decay: float) -> Build:
    """base * decay ** where: ``decay`` times the base value at the end."""
    return lambda base, stretch: ExponentialParamScheduler(base, decay)


@register_schedule("inverse_sqrt")
def inverse_sqrt(length: float | None = None, unit: Unit = "updates") -> Build:
    """base * sqrt(length / max(length, k)), where k counts from the training's start.

    With a warm-up of that length from 0 it is the schedule of Vaswani et al., "Attention is all
    you need", 2017; without one, of Raffel et al. (T5), 2020.

    Args:
        length: how long the base value holds; default: the warm-up's length.
        unit: of the length: ``updates``, ``epochs``, or ``fraction`` of what follows the warm-up.
    """
    check_unit(unit)
    if length is not None and length <= 0:
        raise ConfigError("schedule.length", f"{length} is not above 0")

    def build(base: float, stretch: Stretch) -> ParamScheduler:
        before = stretch.updates_before / stretch.updates
        held = before if length is None else before + stretch.place(length, unit)
        if held <= 0:
            raise ConfigError("schedule.length", "give a length, or schedule.warmup")
        return _InverseSqrt(base, held, before)

    return build


class _InverseSqrt(ParamScheduler):  # type: ignore[misc]
    """See :func:`inverse_sqrt`; lengths as fractions of the curve's stretch."""

    def __init__(self, base: float, held: float, before: float) -> None:
        self._base, self._held, self._before = base, held, before

    def __call__(self, where: float) -> float:
        return self._base * math.sqrt(self._held / max(self._held, self._before + where))


@register_schedule("composite")
def composite(
    parts: list[Mapping[str, Any]], lengths: list[float | None], unit: Unit = "fraction"
) -> Build:
    """Curves one after the other.

    Args:
        parts: each a mapping ``{name: ..., options}`` of a registered schedule.
        lengths: of the parts. Fractions add up to 1; in updates and epochs the last may be null,
            the rest.
        unit: of the lengths: ``fraction``, ``updates`` or ``epochs``.
    """
    check_unit(unit)
    builds: list[Build] = []
    for number, part in enumerate(parts):
        options = {k: v for k, v in part.items() if k != "name"}
        if "name" not in part:
            raise ConfigError(f"schedule.parts.{number}.name", "give the name of a schedule")
        builds.append(_part(f"schedule.parts.{number}", part["name"], options))
    if len(lengths) != len(parts) or not parts:
        raise ConfigError("schedule.lengths", "give one length for each of the parts")
    if unit == "fraction":  # else they are checked when the training's length is known
        nothing = [ConstantParamScheduler(0.0)] * len(builds)
        Joined(nothing, shares(lengths, unit, Stretch(1, 1)))

    def build(base: float, stretch: Stretch) -> ParamScheduler:
        fractions = shares(lengths, unit, stretch)
        starts = accumulate(fractions, initial=0.0)
        places = [stretch.part(a, b) for a, b in zip(starts, fractions, strict=False)]
        made = [build(base, place) for build, place in zip(builds, places, strict=True)]
        return Joined(made, fractions)

    return build


def _part(key: str, name: str, options: Mapping[str, Any]) -> Build:
    try:
        make = schedules.get(name).target
        inspect.signature(make).bind(**options)
    except (RegistryError, TypeError) as error:
        raise ConfigError(key, f"{name}: {error}") from None
    build: Build = make(**options)
    return build
