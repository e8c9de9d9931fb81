"""Disk: what is on it stays there when the power fails, once it was flushed."""

from __future__ import annotations

import contextlib
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


def make_folder(path: Path, parents: bool = True) -> None:
    """Make a folder, and those above it, each with its name on the disk.

    Args:
        path: the folder.
        parents: False: those above it have to be there.

    Raises:
        OSError: it cannot be made.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=parents, exist_ok=True)
    for folder in new:
        with contextlib.suppress(PermissionError):  # it may be written, and not be read
            flush(folder.parent)
