"""A new process for every run: a fork from a helper that has imported the engine once.

The helper is started when it is first needed and lives as long as the test session. A fork of it
is a process that has never trained: no generator was drawn from, no handler set, no worker started.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

ROOT = Path(__file__).resolve().parents[2]
# torch imports dynamo when the first optimizer is made: two seconds for each process; hooks import
# those after it when they start or draw: one more; a bucket, s3fs: half of one; torchmetrics: two.
PRELOADED = ("pytest", "phaseloop.engine.task", "phaseloop.hooks", "phaseloop.train_steps",
             "phaseloop.tools.jobs", "phaseloop.tools.run", "hydra", "tests.rigs.r1",
             "phaseloop.engine.backends.launch", "tests.crash.command", "torch._dynamo",
             "torch.utils.tensorboard", "matplotlib.backends.backend_agg", "s3fs",
             "torchmetrics.classification",
             *(["horovod.torch"] if importlib.util.find_spec("horovod") else []))  # fmt: skip
MORE = "PHASELOOP_TESTS_PRELOAD"
"""A variable with the name of one more module, of tests in an environment of their own."""

_TO_LEAVE = 3.0
"""Seconds, less than a failed process has by itself: gloo may hang at both ends of a connection
that both have cut."""

LIMIT = 180.0
"""Seconds that a process gets before it counts as hanging; far more than any needs,
whatever else the machine does."""


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code; minus the signal's number when a signal ended it.
        value: what its function returned, or None.
        output: what it printed.
    """

    code: int
    value: Any
    output: str


class Running:
    """A process that has been started.

    Args:
        pid: its process id; it leads a process group of its own.
        folder: where it leaves what it prints and returns.
    """

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.done = False
        self._folder = folder

    def send(self, number: int) -> None:
        """Send it a signal; one that has ended does not mind."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def printed(self) -> str:
        """What it has printed so far; nothing where it was killed before it could."""
        output = self._folder / "output"
        return output.read_text(errors="replace") if output.exists() else ""

    def wait(self, limit: float = LIMIT) -> Ended:
        """Wait for its end.

        Raises:
            AssertionError: it hangs; the message shows where.
        """
        ended = self.ended(limit)
        if ended is None:
            self.dump()
            time.sleep(0.2)
            raise AssertionError(f"the process hangs after {limit} s:\n{self.kill()}")
        return ended

    def ended(self, limit: float) -> Ended | None:
        """How it ended; None: it still runs after ``limit`` seconds. To be asked until it ended."""
        code = _helper().ask("wait", self.pid, limit)
        if code is None:
            return None
        self.done = True
        output = self.printed()
        result = self._folder / "result"
        value = pickle.loads(result.read_bytes()) if result.exists() else None
        shutil.rmtree(self._folder)
        return Ended(code, value, output)

    def dump(self) -> None:
        """Have it print the stacks of all its threads, by faulthandler, soon; that ends it."""
        self.send(signal.SIGABRT)

    def kill(self) -> str:
        """End it with all its children, at once; what it had printed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _helper().ask("wait", self.pid, LIMIT)
        self.done = True
        return self.printed()


def start(function: Callable[..., Any], *args: Any, **options: Any) -> Running:
    """Start ``function(*args, **options)`` in a new process.

    Args:
        function: one at the top of a module; it is found again there by its name.
        args, options: anything that pickle takes.
    """
    folder = Path(tempfile.mkdtemp(dir=_helper().folder))
    payload = pickle.dumps((function, args, options))
    return Running(_helper().ask("start", payload, str(folder)), folder)


def run(function: Callable[..., Any], *args: Any, **options: Any) -> Ended:
    """``function(*args, **options)`` in a new process, to its end."""
    return start(function, *args, **options).wait()


def result(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What ``function`` returned in a new process, which has to end well."""
    return result_within(LIMIT, function, *args, **options)


def result_within(limit: float, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The same, in so many seconds."""
    ended = start(function, *args, **options).wait(limit)
    assert ended.code == 0, f"ended with {ended.code}:\n{ended.output}"
    return ended.value


def scratch() -> Path:
    """A folder that lives as long as the test session."""
    return _helper().folder


def alive(pid: int) -> bool:
    """The process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# --- inside a new process: an instant, by counting ---


def after_calls(count: int, number: int = signal.SIGKILL) -> None:
    """Send this process a signal at the ``count``-th call or return, of Python or C, from now on.

    So an instant can be chosen, and chosen again, anywhere: in the middle of a save too.
    """
    left = count
    me = os.getpid()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        left -= 1
        if os.getpid() != me:  # in a worker, which has inherited this
            sys.setprofile(None)
        elif left == 0:
            sys.setprofile(None)
            os.kill(me, number)

    sys.setprofile(watch)


def count_calls(function: Callable[..., Any], *args: Any, **options: Any) -> int:
    """How many calls and returns :func:`after_calls` would count in this call."""
    seen = 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal seen
        seen += 1

    sys.setprofile(watch)
    try:
        function(*args, **options)
    finally:
        sys.setprofile(None)
    return seen


# --- the helper, as seen from the tests ---


class _Helper:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="phaseloop-tests-"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, *request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, request)
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_started: list[_Helper] = []


def _helper() -> _Helper:
    if not _started:
        _started.append(_Helper())
        atexit.register(_started[0].close)
    return _started[0]


def _send(stream: BinaryIO, message: Any) -> None:
    stream.write(pickle.dumps(message))
    stream.flush()


# --- the helper itself ---


def _serve() -> None:
    """Fork what is asked for, until nobody asks any more."""
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever an import prints is no reply
    for name in (*PRELOADED, *filter(None, [os.environ.get(MORE)])):
        importlib.import_module(name)
    logging.root.handlers.clear()  # torch_xla gives it one, and the backend takes that away again
    gc.collect()
    gc.freeze()  # else every fork copies all pages when it collects
    while True:
        try:
            kind, *details = pickle.load(requests)
        except EOFError:
            return
        reply = _fork(*details) if kind == "start" else _await(*details)
        _send(replies, reply)


def _await(pid: int, limit: float) -> int | None:
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def _fork(payload: bytes, folder: str) -> int:
    pid = os.fork()
    if pid == 0:
        leave(code_of(_call, payload, Path(folder)))
    return pid


def _call(payload: bytes, folder: Path) -> None:
    """In the new process: call the function, and leave what it returns."""
    _become(folder)
    function, args, options = pickle.loads(payload)
    value = function(*args, **options)
    (folder / "result").write_bytes(pickle.dumps(value))


def code_of(function: Callable[..., Any], *args: Any) -> int:
    """The exit code of a process that does nothing but call this."""
    try:
        function(*args)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """What an interpreter does at its end, but for taking itself apart, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    host = sys.modules.get("phaseloop.engine.backends.host")
    # It has failed, and is gone within seconds; what it was called with says how.
    if host is not None and host._left:
        timer = threading.Timer(_TO_LEAVE, os._exit, [code])
        timer.daemon = True
        timer.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(folder: Path) -> None:
    """What a process of its own has: a group, streams, and an end when its parent ends."""
    os.setsid()
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    faulthandler.enable()


if __name__ == "__main__":
    _serve()
