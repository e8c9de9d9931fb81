"""Joined: curves one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fvcore.common.param_scheduler import ParamScheduler

from phaseloop.engine.errors import ConfigError

BELOW_ONE = math.nextafter(1.0, 0.0)
"""The largest position that a curve may be asked for."""


class Joined(ParamScheduler):  # type: ignore[misc]
    """Curves one after the other, each over its own length, each seeing its own 0 to 1.

    fvcore's composite begins a part 1e-6 early, which is many updates of a long training; here a
    part begins at the first update that is not before its border, up to rounding.

    Args:
        parts: the curves.
        lengths: their lengths as fractions, which add up to 1.

    Raises:
        ConfigError: they do not, one is not positive, or there is not one for each part.
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
        return float(self._parts[-1](min(inside, BELOW_ONE)))
