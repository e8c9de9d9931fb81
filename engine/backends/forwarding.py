"""Forwarding: a launcher hands the signals that it gets on to the processes that it has started.

They have sessions of their own, so that a terminal's Ctrl-C comes to them through here, once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_AT_ONCE = 1.0  # a second Ctrl-C within so many seconds: nothing is waited for
_TO_LEAVE = 5.0  # seconds that processes have after that


class Stopped(BaseException):
    """A signal came when there was nobody to hand it on to."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Forwarding:
    """Handlers for SIGTERM, SIGHUP and SIGINT, while it is entered; a SIGHUP ignored stays so.

    Attributes:
        received: number of the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._processes: tuple[int, ...] = ()
        self._held_back: list[int] | None = None
        self._previous: dict[int, Any] = {}
        self._last_interrupt = -_AT_ONCE
        self._until = float("inf")

    def __enter__(self) -> Forwarding:
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup's doing
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def overdue(self) -> bool:
        """Processes are still here long after they were told to leave at once."""
        return time.monotonic() > self._until

    def to(self, processes: Iterable[int]) -> None:
        """From now on these processes get the signals."""
        self._processes = tuple(processes)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """While processes are started, signals wait."""
        waiting = self._held_back = []
        try:
            yield
        finally:
            self._held_back = None
            for number in waiting:
                self._send(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        if number == signal.SIGINT:
            now = time.monotonic()
            if now - self._last_interrupt <= _AT_ONCE:
                self._until = min(self._until, now + _TO_LEAVE)
            self._last_interrupt = now
        if self._held_back is not None:
            self._held_back.append(number)
        elif self._processes:
            self._send(number)
        else:
            raise Stopped(self.received)

    def _send(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
