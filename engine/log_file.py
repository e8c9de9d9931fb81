"""Log file: what is logged goes into it as far as the disk takes it."""

from __future__ import annotations

import contextlib
import logging
import sys
from io import TextIOWrapper
from pathlib import Path

from phaseloop.engine.disk import make_folder

ALIKE = {"alike": True}
"""``extra`` of what all processes know and would say alike: only the primary's log has it."""


class LogFile(logging.FileHandler):
    """``log.txt``: where the disk takes no more, that is said once, and the run goes on."""

    _told = False

    def _open(self) -> TextIOWrapper:
        make_folder(Path(self.baseFilename).parent)  # of one that is opened when it has to be
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging calls it so
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)
