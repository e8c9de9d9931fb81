"""Signals: SIGTERM, SIGHUP and Ctrl-C ask a run to stop at its next border, and lose nothing.

SIGHUP comes when the terminal is closed; a run under nohup, which ignores it, goes on. A handler
sets a flag. Only where the run waits for data, with every window closed, does it raise
:class:`Interrupted`, so that a slow dataset or worker does not hold the stop up.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

log = logging.getLogger("phaseloop")

_ANSWER = b"stopping at the next border; Ctrl-C twice in a second leaves at once, unsaved\n"
_LOOK = 0.05  # seconds between two looks at whether a save is over
_TO_SAY = 2.0  # seconds for the last words before the process leaves
_SAME = 0.05  # seconds in which nobody presses twice: one came by several ways
_TO_LEAVE = 3.0  # seconds that threads have after a second Ctrl-C
_AT_ONCE = 1.0  # a second Ctrl-C within this many seconds does not wait for a border


class Interrupted(BaseException):
    """Raised by a signal handler while the run waits for data."""


class Signals:
    """Handlers for SIGTERM, SIGHUP and SIGINT while a run lasts.

    Handlers found are called too, and put back by :meth:`restore`. A SIGHUP that is ignored
    stays so. Outside the main thread, where Python allows no handlers, it is a :class:`Receiver`
    that they come from, in a process that has one.

    Args:
        grace: seconds after SIGTERM or SIGHUP in which a border has to be reached; after that
            the process leaves at once, unsaved, with exit code 143 or 129.

    Attributes:
        received: number of the first signal, or None.
        waiting: the run waits for data and may be interrupted; set around the wait.
        saving: the run saves, or waits for a save: at a border, so without a time limit, which
            begins anew when that is over.
        lines_below: lines that a display keeps at the end of the terminal, the cursor at the end of
            the last: what is said from here comes above them.
    """

    def __init__(self, grace: float = 8.0) -> None:
        self.received: int | None = None
        self.waiting = False
        self.saving = False
        self.lines_below = 0
        self._at_border = False
        self._grace = grace
        self._previous: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._last_interrupt = -_AT_ONCE

    def install(self) -> None:
        """Take over SIGTERM, SIGHUP and SIGINT."""
        if threading.current_thread() is not threading.main_thread():
            if Receiver.here is not None:
                Receiver.here.add(self)
            return
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup's doing
            self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Put back the handlers found, and call off the time limit."""
        if self._timer is not None:
            self._timer.cancel()
        if Receiver.here is not None:
            Receiver.here.remove(self)
        for number, handler in self._previous.items():
            # None: the handler was not set from Python and cannot be set from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def reached_border(self) -> None:
        """The run has stopped where it can be saved: what is left has no time limit."""
        self._at_border = True
        if self._timer is not None:
            self._timer.cancel()

    @contextlib.contextmanager
    def no_limit(self) -> Iterator[None]:
        """While the run saves, or waits for a save."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False

    def name(self) -> str:
        """Name of the signal received, such as ``SIGTERM``."""
        return signal.Signals(self.received).name if self.received else ""

    def receive(self, number: int) -> None:
        """A signal has come; with its time limit, which Ctrl-C has none of."""
        if self.received is None:
            self.received = number
        if number != signal.SIGINT:
            self._start_timer(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.receive(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        self._chain(number, frame)
        if number == signal.SIGINT:
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
        if os.environ.get("RANK", "0") == "0":  # of several processes one answers
            answer(self.lines_below)
        self._last_interrupt = now

    def _start_timer(self, number: int) -> None:
        if self._timer is None and not self._at_border:
            self._timer = threading.Timer(self._grace, self._leave, [number])
            self._timer.daemon = True
            self._timer.start()

    def _leave(self, number: int) -> None:
        while self.saving:
            while self.saving:
                time.sleep(_LOOK)
            time.sleep(self._grace)
        if self._at_border:
            return
        name = signal.Signals(number).name
        try:
            say_within(
                _TO_SAY,
                f"no border was reached {self._grace:g} s after {name} (run.grace): leaving "
                f"unsaved; the newest checkpoint stands",
            )
        finally:
            os._exit(128 + number)


class Receiver:
    """Takes the signals of a process whose ranks are threads, in its main thread, for all of them.

    Before any of them trains, and after the last has, a signal ends the process at once.

    Args:
        abort: called when a second Ctrl-C ends the run at once: lets go of those who wait.

    Attributes:
        here: the one of this process.
    """

    here: Receiver | None = None

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._runs: dict[int, Signals] = {}
        self._received: int | None = None
        self._last_interrupt = -_AT_ONCE

    def install(self) -> None:
        """Take over SIGTERM, SIGHUP and SIGINT; in the main thread."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup's doing
            signal.signal(number, self._handle)
        Receiver.here = self

    def add(self, run: Signals) -> None:
        """The run of this thread; one that comes late learns what the others have."""
        self._runs[threading.get_ident()] = run
        if self._received is not None:
            run.receive(self._received)

    def remove(self, run: Signals) -> None:
        """It is over."""
        self._runs = {thread: other for thread, other in self._runs.items() if other is not run}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        runs = dict(self._runs)
        if not runs:
            os._exit(128 + number)
        self._received = self._received or number
        if number == signal.SIGHUP:
            _leave_terminal()
        for run in runs.values():
            run.receive(number)
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if now - self._last_interrupt <= _SAME:
            return
        if now - self._last_interrupt <= _AT_ONCE:
            self._leave_at_once(list(runs))
        else:
            answer(max(run.lines_below for run in runs.values()))
        self._last_interrupt = now

    def _leave_at_once(self, threads: list[int]) -> None:
        """Each thread gets a KeyboardInterrupt; one that does not come to it is not waited for."""
        timer = threading.Timer(_TO_LEAVE, os._exit, [128 + signal.SIGINT])
        timer.daemon = True
        timer.start()
        for thread in threads:
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))
        self._abort()


def answer(lines: int) -> None:
    """Say what a Ctrl-C has done: not by print, since a handler may come in the middle of one.

    Args:
        lines: of a display that the cursor stands at the end of; they are wiped out, with what
            the terminal has shown of the key, and drawn anew by whoever draws them.
    """
    if lines and os.isatty(2):
        wiped = b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (lines - 1)
        os.write(2, wiped + _ANSWER + b"\n" * (lines - 1))
    else:
        os.write(2, b"\n" + _ANSWER)


def say_within(seconds: float, text: str, level: int = logging.ERROR) -> None:
    """Log it, by each handler for itself: one may hang, as the main thread does in it.

    A terminal or a pipe that takes no more holds its handler's lock, and the process has to leave.
    """
    record = log.makeRecord(log.name, level, __file__, 0, text, (), None)
    threads = [
        threading.Thread(target=_give, args=(handler, record), daemon=True)
        for handler in [*log.handlers, *(logging.root.handlers if log.propagate else ())]
        if record.levelno >= handler.level
    ]
    until = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _give(handler: logging.Handler, record: logging.LogRecord) -> None:
    handler.handle(record)
    handler.flush()


def _leave_terminal() -> None:
    """Where the terminal is gone, every word to it is an error, and none may hold up the save."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
