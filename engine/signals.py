"""Signals: SIGTERM and Ctrl-C ask a run to stop at its next border, and lose nothing.

A handler sets a flag. Only where the run waits for data, with every window closed, does it raise
:class:`Interrupted`, so that a slow dataset or worker does not hold the stop up.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

log = logging.getLogger("phaseloop")

_ANSWER = b"\nstopping at the next border; Ctrl-C twice within a second leaves at once, unsaved\n"
_AT_ONCE = 1.0  # a second Ctrl-C within this many seconds does not wait for a border


class Interrupted(BaseException):
    """Raised by a signal handler while the run waits for data."""


class Signals:
    """Handlers for SIGTERM and SIGINT while a run lasts.

    Handlers found are called too, and put back by :meth:`restore`. Outside the main thread
    nothing is installed, since Python does not allow it there.

    Args:
        grace: seconds after SIGTERM in which a border has to be reached; after that the process
            leaves at once, unsaved, with exit code 143.

    Attributes:
        received: number of the first signal, or None.
        waiting: the run waits for data and may be interrupted; set around the wait.
    """

    def __init__(self, grace: float = 8.0) -> None:
        self.received: int | None = None
        self.waiting = False
        self._grace = grace
        self._previous: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._last_interrupt = -_AT_ONCE

    def install(self) -> None:
        """Take over SIGTERM and SIGINT."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back the handlers found, and call off the time limit."""
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._previous.items():
            # None: the handler was not set from Python and cannot be set from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def reached_border(self) -> None:
        """The run has stopped where it can be saved: what is left has no time limit."""
        if self._timer is not None:
            self._timer.cancel()

    def name(self) -> str:
        """Name of the signal received, such as ``SIGTERM``."""
        return signal.Signals(self.received).name if self.received else ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        self._chain(number, frame)
        if number == signal.SIGTERM:
            self._start_timer()
        else:
            self._second_interrupt()
        if self.waiting:
            self.waiting = False
            raise Interrupted

    def _chain(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _second_interrupt(self) -> None:
        now = time.monotonic()
        if now - self._last_interrupt <= _AT_ONCE:
            raise KeyboardInterrupt("second Ctrl-C: leaving at once, unsaved")
        os.write(2, _ANSWER)  # not print: a handler may come in the middle of one
        self._last_interrupt = now

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._grace, self._leave)
            self._timer.daemon = True
            self._timer.start()

    def _leave(self) -> None:
        log.error(
            "no border was reached %g s after SIGTERM (run.grace): leaving unsaved; "
            "the newest checkpoint stands",
            self._grace,
        )
        for handler in log.handlers:
            handler.flush()
        os._exit(128 + signal.SIGTERM)
