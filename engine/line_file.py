"""Line file: rows of a run in its folder, each whole or not there, cut back to a checkpoint's."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from phaseloop.engine.disk import flush, replace
from phaseloop.engine.task import Task

log = logging.getLogger("phaseloop")


class LineFile:
    """A file of lines that grows with the run, from the first process alone.

    A checkpoint knows how many bytes it had, and a resume cuts it back to there.

    Args:
        name: of the file in the run's folder.

    Attributes:
        path: the file; None: nothing is written, here or at all.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path: Path | None = None
        self._open: IO[bytes] | None = None
        # The run was in this folder before. Else its rows are another machine's, which is said.
        self._expected = False

    @property
    def is_open(self) -> bool:
        """Lines can be added."""
        return self._open is not None

    def open(self, task: Task) -> None:
        """At the start of a run; lines stay where it goes on from a checkpoint of this folder."""
        if task.folder is None or not task.primary:
            return
        self.path = Path(task.folder.path) / self.name
        self._expected = self.path.exists() or bool(task.folder.status())
        self._reopen()
        flush(self.path.parent)  # its name, which may be new
        if not task.resumed_here:
            self.cut(0)

    def size(self) -> int:
        """Bytes; also of a file that was closed."""
        return 0 if self.path is None else self.path.stat().st_size

    def add(self, line: bytes) -> None:
        """The whole line or, with an error, none of it: a full disk takes what it has room for."""
        if self._open is None:
            return
        before = os.fstat(self._open.fileno()).st_size
        try:
            while line:
                line = line[self._open.write(line) :]
        except OSError:
            self._open.truncate(before)
            raise

    def keep(self, size: int, task: Task, more: Callable[[bytes], bool] | None = None) -> None:
        """Cut it back to the lines that end within the first ``size`` bytes.

        Where checkpoints lie elsewhere the file may be of another machine's part of the run, whose
        lines end at other places. That it is shorter is told where the run was in this folder.

        Args:
            more: says of a line after these that it stays, too; the first that does not ends it.
        """
        if self.path is None or self._open is None:
            return
        there = self.size()
        if there < size and self._expected and task.resumed_here:
            log.warning("%s lacks rows from before the checkpoint: it has %d bytes, and had %d",
                        self.path, there, size)  # fmt: skip
        with open(self.path, "rb") as file:
            end = file.read(size).rfind(b"\n") + 1
            file.seek(end)
            for line in file:
                if more is None or not more(line):
                    break
                end += len(line)
        self.cut(end)

    def cut(self, size: int) -> None:
        """Cut it off behind so many bytes."""
        assert self._open is not None
        self._open.truncate(size)

    def rewrite(self, write: Callable[[IO[bytes]], Any]) -> None:
        """Put other content in its place, at once: a reader sees the old one or the new one."""
        if self.path is None or self._open is None:
            return
        replace(self.path, write)
        flush(self.path.parent)
        self.close()
        self._reopen()

    def close(self) -> None:
        """No line comes any more."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _reopen(self) -> None:
        assert self.path is not None
        # Unbuffered, so that a whole line is in the file or none of it.
        self._open = open(self.path, "ab", buffering=0)  # noqa: SIM115 held while the run lasts
