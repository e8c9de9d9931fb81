"""Options of a stream: what of a set's options a stream cannot have, and why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from phaseloop.engine.data.options import check_limit
from phaseloop.engine.errors import ConfigError, DataError
from phaseloop.engine.log_file import ALIKE

if TYPE_CHECKING:
    from phaseloop.engine.data.source import Data

log = logging.getLogger("phaseloop")

_REFUSED = {
    "sampler": "a stream comes in its own order: choose samples in its __iter__",
    "rebuild_every": "a stream begins anew in each epoch by itself; one that has a method "
    "set_epoch(epoch) is told the epoch",
}


def check_stream(data: Data, key: str, train: bool) -> None:
    """Check what can be checked without reading a sample.

    Raises:
        ConfigError: an option is one that a stream cannot have.
        DataError: it says that it has no sample, or too few to make one batch.
    """
    if data.shuffle and train:
        raise ConfigError(f"{key}.shuffle", "true, and a stream cannot be shuffled from outside: "
                          "shuffle in its __iter__, and leave this out")  # fmt: skip
    for name, why in _REFUSED.items():
        if getattr(data, name) is not None:
            raise ConfigError(f"{key}.{name}", why)
    samples = data.stream_length() if not isinstance(data.limit, float) else None
    if isinstance(data.limit, float):
        raise ConfigError(
            f"{key}.limit",
            f"{data.limit} is a fraction, and how long a stream is shows at its end: give a "
            f"number of samples",
        )
    if data.limit is not None and goes_on_by_itself(data.first):
        log.warning(
            "%s.limit: a pass does not read this stream to its end, and %s, its own iterator, goes "
            "on where it was in the next one. It keeps no state (state_dict, load_state_dict): a "
            "resumed run begins it anew, and reads other samples",
            key,
            type(data.first).__name__,
            extra=ALIKE,
        )
    if samples is not None:
        if samples == 0:
            raise DataError(f"{key}: the stream is empty: its length is 0")
        check_limit(data.limit, len(data.first), f"{key}.limit")
        data.check_samples(samples, key)


def check_shares(data: Data, key: str, world_size: int) -> None:
    """Check that every process has a share of a batch.

    Raises:
        ConfigError: it has none.
    """
    smallest = min(data.sizes.values())
    for name, value in (("batch_size", smallest), ("limit", data.limit)):
        if isinstance(value, int) and value < world_size:
            raise ConfigError(
                f"{key}.{name}",
                f"{value} is less than the {world_size} processes, of which each reads a share of "
                f"a stream: give at least {world_size}",
            )


def goes_on_by_itself(stream: Any) -> bool:
    """It is its own iterator, and nobody can ask it where it stands."""
    return hasattr(stream, "__next__") and not hasattr(stream, "state_dict")
