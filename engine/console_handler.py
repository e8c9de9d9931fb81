"""Console handler: what is logged, printed for people."""

from __future__ import annotations

import logging
import shutil
import sys

from phaseloop.engine.display import is_terminal
from phaseloop.engine.report import fitting, folded


class ConsoleHandler(logging.Handler):
    """Prints messages to what ``sys.stdout`` is now: a live display may have put itself there.

    A record logged with ``extra=ONLY_FILE`` goes to ``log.txt`` alone. One with ``parts``, as
    :func:`~phaseloop.engine.report.fitting` takes them, is made to fit into a terminal.
    """

    _gone = False

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "only_file", False):
            return
        if self._gone:
            return
        try:
            text = _fitted(record)  # a traceback goes to log.txt; the caller prints it
            prefix = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
            print(f"{prefix}{text}", file=sys.stdout, flush=True)
        except BrokenPipeError:  # `| head`: who listened has gone, and the run goes on
            self._gone = True
        except Exception:
            self.handleError(record)


def _fitted(record: logging.LogRecord) -> str:
    """The message, of which a terminal gets what fits beside each other, else line by line."""
    parts = getattr(record, "parts", None)
    # A live display in its place is a terminal, and does not say so.
    if not parts or not is_terminal(getattr(sys.stdout, "rich_proxied_file", sys.stdout)):
        return record.getMessage()
    width = shutil.get_terminal_size().columns
    return folded(fitting(parts, width), width)
