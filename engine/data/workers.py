"""Worker processes: deaf to signals from their first instant, and ended without a long wait."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import TypeVar

T = TypeVar("T")

_PARENTS_BUSINESS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

_one_at_a_time = threading.Lock()
"""Of threads that are ranks each has workers of its own, and must not take another's for them."""

_PATIENCE = 1.0
"""Seconds that a worker gets to end by itself."""


def start(make: Callable[[], T], processes: list[BaseProcess]) -> T:
    """What ``make`` gives; the processes that it starts are added to ``processes``.

    They are born with the signals that are the parent's business held back, so that a Ctrl-C in
    that very instant does not run the parent's handler in them.
    """
    with _one_at_a_time:
        before = {process.pid for process in multiprocessing.active_children()}
        old = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_BUSINESS)
        try:
            return make()
        finally:
            # Also of a start cut short: whoever ends the workers has to know them all.
            processes += [p for p in multiprocessing.active_children() if p.pid not in before]
            signal.pthread_sigmask(signal.SIG_SETMASK, old)


def prepare_worker(_: int) -> None:
    """In a worker: signals are the parent's business, and it ends when the parent does."""
    for number in _PARENTS_BUSINESS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def end(processes: list[BaseProcess], let_go: Callable[[], None]) -> None:
    """End worker processes; one that is in the middle of a slow sample is killed.

    Args:
        let_go: gives up the loader, upon which torch asks them to end. It would then wait for
            each for 5 s, and the interpreter, at its end, for as long as the sample takes.
    """
    with _unwatched() as may_kill:
        timer = threading.Timer(_PATIENCE, _kill, [processes])
        if may_kill:
            timer.start()
        let_go()
        for process in processes:
            process.join(None if may_kill else 0)
        timer.cancel()


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()


@contextlib.contextmanager
def _unwatched() -> Iterator[bool]:
    """torch's handler of SIGCHLD takes a killed worker for an error; whether it could be put away,
    which Python allows in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield True
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
