"""Disk: what is on it stays there when the power fails, once it was flushed."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until the disk has the content of a file, or the names in a folder.

    Raises:
        OSError: it is not there, or the disk does not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, each with its name on the disk.

    Raises:
        OSError: it cannot be made.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        flush(folder.parent)
