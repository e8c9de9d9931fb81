"""Waiting: of processes that waited for one another in vain, who did not come, and who was where.

Each that gives up leaves a word in the launcher's store, and looks who else does. One that hangs,
or was stopped, leaves none.
"""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from pathlib import Path

import torch
from torch.distributed import Store

from phaseloop.engine.outcomes import is_lost

_LIMIT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_TO_HEAR = 1.0
"""Seconds in which whoever has cut a connection says that it did so since it gave up."""

_TO_TELL = 3.0
"""Seconds for the others to give up as well: they began to wait about when this one did."""

_ANYBODY = "waited"
"""The key of the rank that gave up last."""

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__).parent


def explained(error: BaseException, store: Store, rank: int, world_size: int) -> str:
    """Why a time limit was reached, in a sentence; empty: none was.

    Args:
        error: what this process ends with.
        store: that all of them reach.
    """
    if not isinstance(error, RuntimeError):
        return ""
    where = {rank: _place(error)}
    # Gloo cuts its connections at the first limit, so another may meet with that before its own.
    if not _LIMIT.search(str(error)) and not (is_lost(error) and _somebody_gave_up(store, rank)):
        return ""
    with contextlib.suppress(Exception):  # the store's machine may be what is gone
        store.set(f"waited/{rank}", where[rank])
        store.set(_ANYBODY, str(rank))
        until = time.monotonic() + _TO_TELL
        while len(where) < world_size and time.monotonic() < until:
            for other in range(world_size):
                if other not in where and store.check([f"waited/{other}"]):
                    where[other] = store.get(f"waited/{other}").decode()
            time.sleep(0.05)
    limits = "the time limit (backend.timeout; at the start backend.start_timeout)"
    missing = [str(other) for other in range(world_size) if other not in where]
    if missing:
        return (
            f"rank {', '.join(missing)} did not come within {limits}; rank {rank} waited at "
            f"{where[rank]}. The hook watchdog writes down where a process stands that hangs"
        )
    places = "; ".join(f"rank {other} at {where[other]}" for other in sorted(where))
    return f"the processes waited for one another at different places for {limits}: {places}"


def _somebody_gave_up(store: Store, rank: int) -> bool:
    """Another than this one has left word that it did."""
    until = time.monotonic() + _TO_HEAR
    with contextlib.suppress(Exception):
        while time.monotonic() < until:
            if store.check([_ANYBODY]) and store.get(_ANYBODY).decode() != str(rank):
                return True
            time.sleep(0.05)
    return False


def _place(error: BaseException) -> str:
    """Where the wait began: the innermost line that is neither torch's nor a backend's."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame
        for frame in frames
        if _TORCH not in Path(frame.filename).parents and Path(frame.filename).parent != _HERE
    ]
    frame = (ours or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
