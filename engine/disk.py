"""Disk: what is on it stays there when the power fails, once it was flushed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


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


def replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file by renaming: a reader sees the old one or the new one, and never half of it.

    Args:
        path: the file; two that write it at once would leave a mixture.
        write: writes the content to the open file that it gets.

    Raises:
        OSError: the disk does not take it; what was there stands.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
