"""Launch: the processes of one command on this machine, and one end for all of them.

Torch's elastic agent meets other machines, starts the processes, and starts them again. What ends
them is here: signals are handed on, one failure ends all, and its cause is said once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError

from phaseloop.engine import outcomes
from phaseloop.engine.backends import hearing
from phaseloop.engine.backends.forwarding import Forwarding, Stopped
from phaseloop.engine.backends.joining import PHASELOOP, STARTED_BY
from phaseloop.engine.outcomes import Outcome
from phaseloop.engine.starting import Starting

PARENT = "PHASELOOP_PARENT"
"""Process id of the launcher, with which its processes end."""

_ERROR = 1
_SIGNALLED = 128
_PATIENCE = 6.0  # seconds from one process's failure to the others' last
_LOOK = 0.1  # seconds between two looks at the processes
_ELSEWHERE = Outcome(_ERROR, "was ended, since another machine's processes have failed", lost=True)


def launch(
    command: Sequence[str],
    starting: Starting,
    environment: Mapping[str, str] | None = None,
    patience: float = 1800.0,
) -> int:
    """Start the processes, wait for them, and say how they ended.

    Args:
        command: program and arguments of each process.
        starting: how many.
        environment: variables that they get beside this process's own.
        patience: seconds in which the machines have to meet.

    Returns:
        The exit code that one process would have had: 0, 1, 2, 129, 130 or 143.
    """
    forwarding = Forwarding()
    ours = _environment(starting, environment or {})
    with _quiet(), _environ(ours), tempfile.TemporaryDirectory(prefix="phaseloop-") as folder:
        try:
            with forwarding:
                return _Agent.made(command, starting, folder, patience, forwarding).code()
        except Stopped as stopped:
            return _SIGNALLED + stopped.number
        except RendezvousError as error:
            what = f"the {starting.nodes} machines cannot meet, or have lost one another"
            _say(f"{what}, at {starting.rendezvous or 'this machine'}: {_reason(error)}")
            return _ERROR


class _Agent(LocalElasticAgent):
    """The elastic agent, with an end of ours."""

    @classmethod
    def made(
        cls,
        command: Sequence[str],
        starting: Starting,
        folder: str,
        patience: float,
        forwarding: Forwarding,
    ) -> _Agent:
        """An agent for this command."""
        meeting = RendezvousParameters(
            backend="c10d",
            endpoint=starting.rendezvous or "localhost:0",
            run_id=PHASELOOP,
            min_nodes=starting.nodes,
            max_nodes=starting.nodes,
            local_addr=_own_address(starting.rendezvous),
            join_timeout=math.ceil(patience),  # whole seconds, and never 0
        )
        spec = WorkerSpec(
            role=PHASELOOP,
            local_world_size=starting.processes,
            rdzv_handler=registry.get_rendezvous_handler(meeting),
            entrypoint=command[0],
            args=tuple(command[1:]),
            max_restarts=starting.restarts,
            monitor_interval=_LOOK,
        )
        agent = cls(spec, DefaultLogsSpecs(log_dir=folder), shutdown_timeout=int(_PATIENCE))
        agent._forwarding = forwarding
        return agent

    _forwarding: Forwarding
    _failed_with: Outcome | None = None

    def code(self) -> int:
        """Run the processes to their end; the exit code."""
        try:
            result = self.run()
        finally:
            self._rdzv_handler.shutdown()
        if result is None or result.is_failed():
            return _ERROR if self._failed_with is None else self._failed_with.code
        left = [outcomes.left(path) for path in self._processes().error_files.values()]
        return max((outcome.code for outcome in left if outcome is not None), default=0)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        with self._forwarding.held_back():
            started: dict[int, int] = super()._start_workers(worker_group)
            self._forwarding.to(started.values())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = self._processes()
        if self._forwarding.overdue:
            _kill(processes)
        codes = {n: p.proc.poll() for n, p in processes.subprocess_handlers.items()}
        failed = {n: code for n, code in codes.items() if code}
        if failed or hearing.is_known(worker_group):
            noticed = time.time() - _LOOK
            self._end(processes)
            self._judge(failed, noticed, processes, worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _processes(self) -> SubprocessContext:
        assert isinstance(self._pcontext, SubprocessContext)
        return self._pcontext

    def _end(self, processes: SubprocessContext) -> None:
        """Ask those that are left to end, and see to it."""
        self._forwarding.to(())
        running = [p.proc for p in processes.subprocess_handlers.values() if p.proc.poll() is None]
        for process in running:
            process.terminate()
        until = time.monotonic() + _PATIENCE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        _kill(processes)

    def _judge(
        self,
        failed: Mapping[int, int],
        noticed: float,
        processes: SubprocessContext,
        group: WorkerGroup,
    ) -> None:
        """Find the cause among all that failed, say it, and whether all are started again."""
        files = processes.error_files
        ends = {n: self._outcome(code, files[n], noticed) for n, code in failed.items()}
        for n, file in files.items():
            left = outcomes.left(file)
            if left is not None and n not in ends and 0 < left.code < _SIGNALLED:
                ends[n] = left  # it failed while it was asked to end
        first = min(ends, key=lambda n: _precedence(ends[n]), default=0)
        rank, cause = group.workers[first].global_rank, ends.get(first, _ELSEWHERE)
        # Who was asked to end, or has said itself why it does, says nothing here.
        text = "" if cause.code > _SIGNALLED else outcomes.in_words(rank, cause)
        if group.store is not None and hearing.machines(group) > 1:
            cause, text = hearing.shared(group.store, hearing.machines(group), cause, text)
        self._failed_with = cause
        if text:
            _say(text)
        if cause.code != _ERROR or self._forwarding.received is not None:
            self._remaining_restarts = 0
        if self._remaining_restarts:
            limit = group.spec.max_restarts
            number = limit - self._remaining_restarts + 1
            _say(f"starting all processes again ({number} of {limit})")

    def _outcome(self, code: int, file: str, noticed: float) -> Outcome:
        """How a process ended that failed by itself."""
        left = outcomes.left(file)
        if left is not None:
            return left
        received = self._forwarding.received
        overdue = code == -signal.SIGKILL and self._forwarding.overdue
        if received is not None and (code == -received or overdue):
            return Outcome(_SIGNALLED + received)
        if code - _SIGNALLED in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            return Outcome(code)  # it left unsaved after run.grace, and has said so
        how = f"ended with exit code {code}" if code > 0 else f"died ({_signal_name(-code)})"
        # When nccl or gloo abort a process, they do so since they have lost another.
        lost = code == -signal.SIGABRT
        return Outcome(_ERROR, how, lost=lost, time=noticed)


def _precedence(outcome: Outcome) -> tuple[bool, bool, float]:
    """What happened first, but for what only followed from it."""
    return outcome.lost, outcome.code > _SIGNALLED, outcome.time


def _kill(processes: SubprocessContext) -> None:
    """End each process with all that it has started."""
    for handler in processes.subprocess_handlers.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(handler.proc.pid, signal.SIGKILL)
        handler.proc.wait(_PATIENCE)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _own_address(rendezvous: str | None) -> str:
    """An address of this machine that the others reach: that from which the meeting place is."""
    if rendezvous is None:
        return "127.0.0.1"
    host, _, port = rendezvous.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()  # the rendezvous says what is wrong with the host


def _environment(starting: Starting, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the processes."""
    chosen = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # what is said of lost connections is said by us
    if starting.processes > 1:  # else each takes every core
        chosen["OMP_NUM_THREADS"] = str(max(1, _cores() // starting.processes))
    return {
        **{name: value for name, value in chosen.items() if name not in os.environ},
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are handed on
        STARTED_BY: PHASELOOP,
        PARENT: str(os.getpid()),
        **environment,
    }


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables in the environment of this process, which is that of those it starts."""
    before = {name: os.environ.get(name) for name in variables}
    quit_before = signal.getsignal(signal.SIGQUIT)
    os.environ.update(variables)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, quit_before)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the agent's own words about what we say; LOGLEVEL=INFO shows them."""
    logger = logging.getLogger("torch.distributed.elastic")
    if "LOGLEVEL" in os.environ:
        yield
        return
    nothing, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(nothing)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(nothing)
        logger.propagate = propagate


def _reason(error: BaseException) -> str:
    text = str(error.__cause__ or error) or type(error).__name__
    return text.splitlines()[0]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)
