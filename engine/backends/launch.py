"""Launch: the processes of one command on this machine, and one end for all of them.

Torch's elastic agent meets other machines, starts the processes, and starts them again. What ends
them is here: signals are handed on, one failure ends all, and its cause is said once.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.api import RendezvousError

from phaseloop.engine import outcomes
from phaseloop.engine.backends import hearing
from phaseloop.engine.backends.forwarding import Forwarding, Stopped
from phaseloop.engine.backends.joining import PHASELOOP
from phaseloop.engine.backends.meeting import Meeting
from phaseloop.engine.backends.surroundings import environ, quiet, variables
from phaseloop.engine.outcomes import Outcome
from phaseloop.engine.starting import Starting

_ERROR = 1
_SIGNALLED = outcomes.SIGNALLED
_PATIENCE = 6.0  # seconds from one process's failure to the others' last
_LATER = 5.0  # seconds after which a wait for machines that should be over is given up
_LOOK = 0.1  # seconds between two looks at the processes
_ELSEWHERE = Outcome(_ERROR, "was ended, since another machine's processes have failed", lost=True)


def launch(
    command: Sequence[str],
    starting: Starting,
    environment: Mapping[str, str] | None = None,
    patience: float = 1800.0,
    alike: str = "",
    each_time: Callable[[], Mapping[str, str]] | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Start the processes, wait for them, and say how they ended.

    Args:
        command: program and arguments of each process.
        starting: how many.
        environment: variables that they get beside this process's own.
        patience: seconds in which the machines have to meet.
        alike: a variable of ``environment`` that shall be the same on all machines.
        each_time: is called whenever processes are started; what it gives are values of variables
            of ``environment``.
        tell: is called once with what the processes failed of, in a line, when they are gone.

    Returns:
        The exit code that one process would have had: 0, 1, 2, 129, 130, 131 or 143.
    """
    forwarding = Forwarding()
    ours = variables(starting, environment or {})
    with quiet(), environ(ours), tempfile.TemporaryDirectory(prefix="phaseloop-") as folder:
        try:
            with forwarding:
                where = starting.rendezvous
                limit = Meeting(where, patience + _LATER, folder) if where else nullcontext()
                with limit:
                    agent = _Agent.made(command, starting, folder, patience, forwarding)
                agent._alike, agent._each_time = alike, each_time
                code = agent.code()
                if code == _ERROR and agent.told and tell is not None:
                    tell(agent.told)
                return code
        except Stopped as stopped:
            return _SIGNALLED + stopped.number
        except SignalException as quitting:  # SIGQUIT, the one that torch handles
            return _SIGNALLED + int(quitting.sigval)
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
        agent = cls(spec, DefaultLogsSpecs(log_dir=folder))
        agent._forwarding = forwarding
        return agent

    _forwarding: Forwarding
    _alike = ""
    _each_time: Callable[[], Mapping[str, str]] | None = None
    _failed_with: Outcome | None = None
    told = ""
    """What the processes failed of, in a line, on the machine of rank 0; empty: not known."""

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
        store = worker_group.store
        if self._alike and store is not None and hearing.machines(worker_group) > 1:
            os.environ[self._alike] = hearing.first_said(store, os.environ[self._alike])
        if self._each_time is not None:
            os.environ.update(self._each_time())
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

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        # With our patience, whatever torch's is: its agent has had an option for it since 2.10.
        if self._pcontext is not None:
            self._pcontext.close(death_sig, int(_PATIENCE))
        super()._shutdown(death_sig)

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
        first = min(ends, key=lambda n: outcomes.precedence(ends[n]), default=0)
        rank, cause = group.workers[first].global_rank, ends.get(first, _ELSEWHERE)
        own = cause
        # Who was asked to end, or has said itself why it does, says nothing here.
        text = "" if cause.code > _SIGNALLED else outcomes.in_words(rank, cause)
        if group.store is not None and hearing.machines(group) > 1:
            cause, text = hearing.shared(group.store, hearing.machines(group), cause, text)
        self._failed_with = cause
        known = text and (cause is not own or not own.lost)
        self.told = text.splitlines()[0] if known and group.group_rank == 0 else ""
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


def _reason(error: BaseException) -> str:
    text = str(error.__cause__ or error) or type(error).__name__
    return text.splitlines()[0]


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr, flush=True)
