"""Checkpoints in a folder of this machine: written aside, flushed to disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from phaseloop.engine.checkpoint.names import MANIFEST
from phaseloop.engine.disk import flush, make_folder

LOCK = ".lock"
_TEMPORARY = ".writing-"
_REMOVING = ".removing-"


class Local:
    """A folder of checkpoints, each a folder that is whole or does not exist.

    Methods raise OSError for what the system refuses.

    Args:
        folder: made when the first checkpoint is written.
    """

    keeps_what_it_read = False
    """What is verified is what is loaded: nobody else writes here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken = False

    def exists(self) -> bool:
        """There is a folder, if only an empty one; one that was made for its lock is none."""
        try:
            os.stat(self.folder)
        except FileNotFoundError:
            return False
        return self.entries() != [LOCK]

    def take(self, owner: str) -> None:
        """From now on the folder's parent is there, or it was moved: it is not made anew.

        Who writes here is said by the lock in the folder, which the run's folder takes.
        """
        self._taken = True

    def reach(self) -> None:
        """Find out whether the folder can be made and written."""
        new = not self.folder.is_dir()
        self._make()
        probe = self.folder / f"{_TEMPORARY}probe"
        probe.mkdir(exist_ok=True)
        probe.rmdir()
        if new:
            self.folder.rmdir()

    def entries(self) -> list[str]:
        """Names of all that is in the folder."""
        return _listed(self.folder)

    def files(self, name: str) -> list[str]:
        """Names of all that is in a checkpoint.

        Raises:
            FileNotFoundError, NotADirectoryError: it is none.
        """
        return os.listdir(self.folder / name)

    def begin(self, name: str) -> None:
        """Make room for the files of a new checkpoint."""
        if os.path.lexists(self.folder / name):
            raise FileExistsError("it is there already, and nothing was overwritten")
        self._make()
        remove(self._draft(name))
        self._draft(name).mkdir()

    @contextlib.contextmanager
    def create(self, name: str, file: str) -> Iterator[IO[bytes]]:
        """A new file of that checkpoint; it is on the disk when the context ends."""
        with open(self._draft(name) / file, "wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())

    def finish(self, name: str, manifest: bytes, sizes: Mapping[str, int]) -> None:
        """Now it is a checkpoint, and stays one when the power fails.

        Args:
            manifest: content of its last file.
            sizes: bytes of its other files.
        """
        with self.create(name, MANIFEST) as opened:
            opened.write(manifest)
        flush(self._draft(name))
        os.rename(self._draft(name), self.folder / name)
        try:
            flush(self.folder)
        except OSError:
            # Whether the disk has it is not known, and the caller is told that it failed.
            os.rename(self.folder / name, self._draft(name))
            raise

    def abandon(self, name: str) -> None:
        """Leave nothing of a checkpoint that was not finished."""
        remove(self._draft(name))

    def open(self, name: str, file: str) -> IO[bytes]:
        """A file of a checkpoint, to be read."""
        return open(self.folder / name / file, "rb")

    def move(self, name: str, target: str) -> None:
        """Move a checkpoint to another place below the folder."""
        place = self.folder / target
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.folder / name, place)

    def beside(self, target: str) -> bool:
        """Something is in the way of :meth:`move`."""
        return os.path.lexists(self.folder / target)

    def aside(self, folder: str) -> list[str]:
        """Names of what lies in a folder below this one."""
        return _listed(self.folder / folder)

    def remove(self, name: str) -> None:
        """Remove a checkpoint; cut short, it leaves nothing that passes for one."""
        doomed = self.folder / f"{_REMOVING}{name}"
        remove(doomed)
        try:
            os.rename(self.folder / name, doomed)
        except FileNotFoundError:
            return
        flush(self.folder)  # the name is gone before the contents are
        remove(doomed)

    def clean(self) -> None:
        """Remove what an interrupted write or removal left behind."""
        for entry in self.entries():
            if entry.startswith((_TEMPORARY, _REMOVING)):
                remove(self.folder / entry)

    def _draft(self, name: str) -> Path:
        return self.folder / f"{_TEMPORARY}{name}"

    def _make(self) -> None:
        if not self.folder.is_dir():
            make_folder(self.folder, parents=not self._taken)


def remove(path: Path) -> None:
    """Remove a tree, a file or a link, as far as it can be."""
    if path.is_symlink() or path.is_file():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _listed(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries)
    except FileNotFoundError:
        return []
