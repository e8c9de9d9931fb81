"""Where data lies that `make data` has fetched."""

import os
from collections.abc import Sequence
from pathlib import Path


def places(name: str) -> list[Path]:
    """Folders that may have it, first come first: `data/NAME` of the current one, the cache's."""
    return [Path("data") / name, cache() / "data" / name]


def cache() -> Path:
    """The user's cache for phaseloop, the same that `make data` writes to."""
    if place := os.environ.get("PHASELOOP_CACHE"):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "phaseloop"


def first_of(folders: Sequence[Path], missing: str) -> Path:
    """The first of these that is there.

    Raises:
        ValueError: none is; `missing` is the message, with the folders in the place of its `{}`.
    """
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ValueError(missing.format(" and no folder ".join(str(f.absolute()) for f in folders)))
