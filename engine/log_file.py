"""Log file: what is logged goes into it as far as the disk takes it."""

from __future__ import annotations

import contextlib
import logging
import sys


class LogFile(logging.FileHandler):
    """``log.txt``: where the disk takes no more, that is said once, and the run goes on."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging calls it so
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                print(f"{self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)
