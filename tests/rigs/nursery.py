"""A nursery: what a launcher in a fork starts are forks too, which have imported the engine.

It is forked while the process that is to launch has neither threads nor handlers. What it makes is
a child of that process all the same: the parent in between has ended, and Linux gives its children
to the next process above that asks for them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.rigs import process

_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LOOK = 0.005  # seconds between two looks at a process


def open_one() -> None:
    """In a new process, before it does anything: what it launches comes from a nursery of its own.

    Its signal handlers, streams and folder are then those of this moment, its words, variables,
    session and parent those that it is launched with.
    """
    ours, theirs = socket.socketpair()
    nursery = os.fork()
    if nursery == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    stream = ours.makefile("rwb")

    def start(handler: SubprocessHandler, words: Sequence[str], variables: Any) -> Child:
        python, file, *rest = (word for word in words if not word.startswith("-"))
        assert python == sys.executable, words
        pickle.dump(([file, *rest], dict(variables)), stream)
        stream.flush()
        return Child(pickle.load(stream))

    def close() -> None:
        stream.close()
        ours.close()
        os.waitpid(nursery, 0)

    SubprocessHandler._popen = start  # type: ignore[method-assign,assignment]
    atexit.register(close)


class Child:
    """A child process, with what the elastic agent and our launcher use of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None: it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_LOOK)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal; one that has ended does not mind."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# --- the nursery itself ---


def _serve(requests: socket.socket) -> None:
    """Make what is asked for, until the launcher has ended."""
    stream = requests.makefile("rwb")
    while True:
        try:
            words, variables = pickle.load(stream)
        except EOFError:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            parent, child = os.getpid(), os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            for number in (told, tell, requests.fileno()):
                os.close(number)
            while os.getppid() == parent:
                time.sleep(_LOOK)
            process.leave(process.code_of(_run, words, variables))
        os.waitpid(between, 0)
        pickle.dump(int(os.read(told, 32)), stream)
        stream.flush()
        os.close(told)
        os.close(tell)


def _run(words: list[str], variables: Mapping[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
