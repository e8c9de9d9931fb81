"""What the primary does alone, such as everything on the disk, while the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.errors import PeerError

T = TypeVar("T")


def on_primary(backend: Backend, work: Callable[[], T]) -> T:
    """What ``work`` gives on the primary, on every process.

    Args:
        work: called on the primary alone; gives something that can be pickled.

    Raises:
        PeerError: it failed there; the primary itself raises what it raised.
    """
    if backend.world_size == 1:
        return work()
    if not backend.primary:
        problem, given = backend.broadcast_object(None)
        if problem is not None:
            raise PeerError(f"rank 0: {problem}")
        return given  # type: ignore[no-any-return]
    try:
        given = work()
    except Exception as error:
        backend.broadcast_object((f"{type(error).__name__}: {error}", None))
        raise
    backend.broadcast_object((None, given))
    return given
