"""Places: where a set of training data stands in the configuration, in messages about it."""

from __future__ import annotations

from phaseloop.engine.errors import ConfigError, DataError

USUAL = "data.train"
"""The place that samplers and batch transforms write, which do not know where they stand."""


def placed(error: ConfigError | DataError, key: str) -> ConfigError | DataError:
    """An error about ``data.train...`` as one about ``key...``; any other as it is."""
    text = str(error)
    if key == USUAL or not text.startswith(f"{USUAL}."):
        return error
    if isinstance(error, ConfigError):
        place = key + error.key.removeprefix(USUAL)
        return ConfigError(place, text[len(error.key) + 2 :])
    return DataError(key + text.removeprefix(USUAL))
