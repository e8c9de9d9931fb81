"""Durations: wall time as people write it, ``1h 30m``."""

from __future__ import annotations

import re
from typing import Any

from phaseloop.engine.errors import ConfigError

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms])\s*")


def seconds(text: Any, key: str) -> float:
    """Seconds of a duration such as ``2d``, ``1h 30m`` or ``90s``.

    Args:
        key: where it stands in the configuration, for messages.

    Raises:
        ConfigError: it is none, or no time at all.
    """
    parts = _PART.findall(text) if isinstance(text, str) else []
    if not parts or _PART.sub("", text).strip():
        raise ConfigError(
            key, f"{text!r} is not a time with its unit, such as 90s, 30m, '1h 30m' or 2d"
        )
    total = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not total > 0:
        raise ConfigError(key, f"{text!r} is no time at all")
    return total
