"""Launch: in a process that a launcher has started, the replicas of its command line.

``torch_xla.launch`` starts them in processes below this one: on a TPU in one each, on the CPU all
of them in one, as its threads. What this process adds is an end for all: signals are handed on,
what one failed of is left to the launcher with its rank, and the rest does not outlive it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType

from phaseloop.engine import outcomes, replica
from phaseloop.engine.backends import joining
from phaseloop.engine.backends.xla import lockstep, package
from phaseloop.engine.outcomes import Outcome
from phaseloop.engine.replica import Replica
from phaseloop.engine.signals import Receiver

REPLICAS = "PHASELOOP_REPLICAS"
"""How many replicas a process starts."""

DEVICE = "PHASELOOP_XLA_DEVICE"
"""``backend.device``."""

_PATIENCE = 4.0  # seconds from one replica's failure to the process's end
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_ERROR = 1


def run(command: Callable[[], int]) -> int:
    """The command in every replica; the exit code.

    Args:
        command: gives an exit code, and has left what it failed of; it pickles.
    """
    count = int(os.environ[REPLICAS])
    torch_xla = package.load(os.environ[DEVICE])
    if torch_xla.runtime.device_type() == "CPU":
        os.environ["CPU_NUM_DEVICES"] = str(count)
        # Else the first replica waits for the others to give up memory, and they wait for it.
        os.environ["XLA_ENABLE_PARAM_ALIASING"] = "0"
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # else it takes this process for a replica
    below = _Below()
    with contextlib.suppress(BrokenProcessPool):  # how they ended is looked at in any case
        torch_xla.launch(_replica, args=(command,), start_method="fork")
    return _code(below, count)


class _Below:
    """The processes below this one: they get its signals."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.received: int | None = None
        self._me = os.getpid()
        self._one_at_a_time = threading.RLock()
        os.register_at_fork(after_in_parent=self._look, after_in_child=self._begin)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's doing
                signal.signal(number, self._hand_on)

    def _look(self) -> None:
        """Note a process that was started just now."""
        if os.getpid() == self._me:
            threading.Thread(target=self._note, daemon=True).start()

    def _note(self) -> None:
        for _ in range(100):  # until the caller has noted it, a moment
            with self._one_at_a_time:
                known = {process.pid for process in self.processes}
                new = [p for p in multiprocessing.active_children() if p.pid not in known]
                self.processes += new
                if new and self.received is not None:  # it came before
                    self._send(self.received, new)
            if new:
                return
            time.sleep(0.01)

    def _begin(self) -> None:
        """In a process below, in its main thread, before there is any other."""
        if os.getppid() != self._me or Receiver.here is not None:
            return  # of a loader
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        Receiver(lockstep.abort_all).install()

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        with self._one_at_a_time:  # each gets it once: two are a wish to leave at once
            self.received = number
            self._send(number, self.processes)

    def _send(self, number: int, processes: list[BaseProcess]) -> None:
        for process in processes:
            # Its end is not asked for: in a handler that would take it from who waits for it.
            if process.pid is not None and not wait([process.sentinel], 0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def _replica(_: int, command: Callable[[], int]) -> None:
    """In a replica: the command, to its end."""
    joined = joining.found()
    if joined is not None and joined.by == joining.XLA:
        replica.enter(
            Replica(joined.rank, joined.world_size, joined.local_rank, joined.local_world_size)
        )
    try:
        code = command()
    except KeyboardInterrupt:
        code = outcomes.SIGNALLED + signal.SIGINT
    if code and not outcomes.has_left():
        outcomes.leave(Outcome(code, who=_who()))
    if 0 < code < outcomes.SIGNALLED:
        lockstep.abort_all()
        _Ending.begin(code)


def _who() -> str:
    mine = replica.mine()
    return "" if mine is None else f"rank {mine.rank}"


class _Ending:
    """A replica has failed: the others of this process have a moment to end as well."""

    _begun = threading.Lock()

    @classmethod
    def begin(cls, code: int) -> None:
        if cls._begun.acquire(blocking=False):
            timer = threading.Timer(_PATIENCE, os._exit, [code])
            timer.daemon = True
            timer.start()


def _code(below: _Below, count: int) -> int:
    """The exit code of all; what the first failed of is left to whoever started this process."""
    left = [outcome for outcome in outcomes.by_replica(count) if outcome is not None]
    failed = [p.exitcode for p in below.processes if p.exitcode]
    codes = {outcome.code for outcome in left}
    if any(0 < code < outcomes.SIGNALLED for code in codes):
        first = min(left, key=outcomes.precedence)
    elif failed:
        first = _died(failed[0], below.received)
    elif left:
        first = left[0]
    else:
        return 0
    outcomes.leave(first)
    return first.code


def _died(code: int, received: int | None) -> Outcome:
    """A process below has ended by itself: by a signal, or by ``os._exit``."""
    if code - outcomes.SIGNALLED in _SIGNALS or (received is not None and code == -received):
        return Outcome(code if code > 0 else outcomes.SIGNALLED - code)
    how = f"ended with exit code {code}" if code > 0 else f"died ({signal.Signals(-code).name})"
    return Outcome(_ERROR, how, who="the process of all replicas", lost=code == -signal.SIGABRT)
