"""Submitting: the command line as a job of Slurm, by submitit; queued again where it was cut off.

The job is the same command line, on each of its machines one, and there it starts its processes.
Before its time is over, or when it has to make room, it is told so: the run saves and stops, and
the job is queued again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from phaseloop.engine.config.places import Slurm
from phaseloop.engine.config.processes import RENDEZVOUS
from phaseloop.engine.config.schema import Schema
from phaseloop.engine.errors import ConfigError

SUBMITTED = "PHASELOOP_SUBMITTED"
"""This is the job: there is nothing to be submitted any more."""

_SIGNALLED = 128
_LOOK = 0.2  # seconds between two looks at the process
_TO_BE_ENDED = 900.0  # seconds in which Slurm ends a job that it has told to
_FIRST_PORT, _PORTS = 30000, 2000  # apart from those where the tasks of a step meet
_CODE = re.compile(r"ended with exit code (\d+)")

# Slurm's own variables of a task; the job's processes are not its tasks.
_OF_A_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID")


def submit(words: Sequence[str], job_folder: str, schema: Schema, slurm: Slurm) -> int:
    """Submit a command line as a job; 0 where that is done, or the job's code if it is waited for.

    Raises:
        ConfigError: submitit is not there, or the cluster does not take the job.
    """
    try:
        import submitit
    except ImportError:
        raise ConfigError("launch", "slurm needs submitit: pip install phaseloop[slurm]") from None
    from phaseloop.tools import launching

    assert schema.run.dir is not None
    run = Path(schema.run.dir).absolute()
    folder = Path(slurm.folder or f"{run}.launch")
    nodes = schema.backend.get("nodes", 1)
    job = Job(
        launching.command(words),
        {**launching.environment(job_folder), launching.FOLDER: str(run)},
        os.getcwd(),
        nodes,
    )
    kinds = {"slurm": submitit.SlurmExecutor, "local": submitit.LocalExecutor}
    try:
        executor = kinds[slurm.cluster](folder, max_num_timeout=slurm.requeues)
        executor.update_parameters(**_parameters(slurm, run.name, nodes))
        submitted = executor.submit(job)
    except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        raise ConfigError("launch", str(error).strip().splitlines()[0]) from None
    print(f"submitted   job {submitted.job_id}")
    print(f"log         {submitted.paths.stdout}", flush=True)
    return _code(submitted) if slurm.wait else 0


def _parameters(slurm: Slurm, name: str, nodes: int) -> dict[str, Any]:
    """What submitit calls them; those that are None are left to the cluster."""
    given: dict[str, Any] = {
        "nodes": nodes,
        "gpus_per_node": slurm.gpus_per_node,
        "signal_delay_s": slurm.delay,
        "setup": slurm.setup or None,
        "stderr_to_stdout": True,
    }
    if slurm.cluster == "local":
        given.update(timeout_min=slurm.minutes)
    else:
        given.update(
            time=slurm.minutes,
            job_name=name,
            ntasks_per_node=1,  # which starts the machine's processes
            cpus_per_task=slurm.cpus_per_node,
            mem=None if slurm.mem_gb is None else f"{round(slurm.mem_gb * 1024)}MB",
            partition=slurm.partition,
            account=slurm.account,
            qos=slurm.qos,
            constraint=slurm.constraint,
            additional_parameters=slurm.options or None,
            # One machine whose processes fail ends the job; the others would wait for it.
            srun_args=["--kill-on-bad-exit=1"],
        )
    return {key: value for key, value in given.items() if value is not None}


def _code(submitted: Any) -> int:
    """Wait for a job; the code that its command line ended with."""
    error = submitted.exception()
    if error is None:
        return 0
    found = _CODE.search(str(error))
    if found is None:  # the job's own log says it, if anything does
        print(str(error).strip(), file=sys.stderr)
    return int(found[1]) if found else 1


class Job:
    """What the job does; made again from its pickle each time that it is queued.

    Args:
        command: program and arguments.
        environment: variables beside those of the job.
        folder: the current folder.
        nodes: machines of the job.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, nodes: int
    ) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.folder = folder
        self.nodes = nodes
        self._pid = 0
        self._code: int | None = None

    def __call__(self) -> None:
        """Run the command line.

        Raises:
            RuntimeError: it did not end with 0, and so the job has not.
        """
        previous = signal.signal(signal.SIGTERM, self._pass_on)
        with subprocess.Popen(
            self.command, cwd=self.folder, env=self._variables(), preexec_fn=_ignore_usr2
        ) as process:
            self._pid = process.pid
            self._code = code = _wait(process.pid)
        signal.signal(signal.SIGTERM, previous)
        if code == _SIGNALLED + signal.SIGTERM and self._is_another_task():
            time.sleep(_TO_BE_ENDED)
        if code:
            raise RuntimeError(f"the command line ended with exit code {code}")

    def checkpoint(self) -> Any:
        """Called by submitit when the job's time is nearly over, or it has to make room.

        Returns:
            What is to be queued again; None, where the run has failed.
        """
        from submitit.helpers import DelayedSubmission

        if not self._pid:
            return DelayedSubmission(self)
        self._send(signal.SIGTERM)
        code = _wait(self._pid) if self._code is None else self._code
        return DelayedSubmission(self) if code in (0, _SIGNALLED + signal.SIGTERM) else None

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: scancel, or room is made. Slurm ends the job, and queues it again if it is to.

        A job that ended by itself meanwhile would not be queued again.
        """
        if not self._pid:
            sys.exit(_SIGNALLED + number)
        self._send(number)
        if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and _wait(self._pid) > _SIGNALLED:
            time.sleep(_TO_BE_ENDED)

    def _is_another_task(self) -> bool:
        """The first task queues the job again; one that fails meanwhile would end it for good."""
        first = os.environ.get("SLURM_PROCID", "0") == "0"
        return self.nodes > 1 and not first and os.environ.get("SUBMITIT_EXECUTOR") == "slurm"

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _variables(self) -> dict[str, str]:
        from submitit import JobEnvironment

        from phaseloop.engine.backends.surroundings import PARENT

        job = JobEnvironment()
        variables = {key: value for key, value in os.environ.items() if key not in _OF_A_TASK}
        variables.update(self.environment)
        variables.update({SUBMITTED: "1", PARENT: str(os.getpid())})
        if self.nodes > 1:
            port = _FIRST_PORT + int(job.raw_job_id) % _PORTS
            variables[RENDEZVOUS] = f"{job.hostnames[0]}:{port}"
        return variables

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pid": 0, "_code": None}


def _ignore_usr2() -> None:
    """Where Slurm tells all processes of the job, too: it is for the job, which passes it on."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _wait(pid: int) -> int:
    """Exit code of a process, as shells say it; it is looked at and left there.

    A signal's handler waits, too, in the middle of the wait; so there is no lock.
    """
    while (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
        time.sleep(_LOOK)
    return ended.si_status + (0 if ended.si_code == os.CLD_EXITED else _SIGNALLED)
