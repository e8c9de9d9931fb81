"""Log file: what is logged goes into it as far as the disk takes it."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from phaseloop.engine.disk import make_folder

ALIKE = {"alike": True}
"""``extra`` of what all processes know and would say alike: only the primary's log has it."""


class LogFile(logging.FileHandler):
    """``log.txt``: where the disk takes no more, that is said once, and the run goes on.

    Args:
        path: the file.
        delay: open it when there is something to say.
        lost: says why it must not be opened then; empty: it may.
    """

    def __init__(
        self, path: Path, delay: bool = False, lost: Callable[[], str] = lambda: ""
    ) -> None:
        self._told = False
        self._lost = lost
        super().__init__(path, delay=delay)

    def _open(self) -> TextIOWrapper:
        if why := self._lost():
            raise FileNotFoundError(errno.ENOENT, f"the run's folder was {why}")
        make_folder(Path(self.baseFilename).parent)  # of one that is opened when it has to be
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening it
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging calls it so
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)
