"""Names of checkpoints, and of what is in every one of them."""

from __future__ import annotations

import re

from phaseloop.engine.errors import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"update_(\d{9,})-(\d+)\Z")


def folder_name(updates: int, save: int) -> str:
    """Name of the ``save``-th checkpoint after ``updates`` updates."""
    return f"update_{updates:09d}-{save}"


def is_name(name: str) -> bool:
    """It is a checkpoint's name."""
    return _NAME.match(name) is not None


def position(name: str) -> tuple[int, int]:
    """The reverse of :func:`folder_name`: a later checkpoint's compares greater.

    Raises:
        CheckpointError: ``name`` is not a checkpoint's.
    """
    match = _NAME.match(name)
    if match is None:
        raise CheckpointError(f"{name!r} is not the name of a checkpoint (update_000000012-1)")
    return int(match[1]), int(match[2])
