"""Launching: the command line starts its own processes, each with the same words."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phaseloop.engine.config.processes import HOROVOD, XLA
from phaseloop.engine.config.schema import Schema
from phaseloop.engine.run_folder import COMMAND, RunFolder
from phaseloop.engine.starting import Starting

PATH = "PHASELOOP_PATH"
"""Where modules are looked for, a folder a line."""

JOB = "PHASELOOP_JOB"
"""Of a multirun: the name of this job's folder."""

REPLICAS, DEVICE = "PHASELOOP_REPLICAS", "PHASELOOP_XLA_DEVICE"
"""Of XLA: how many replicas a process starts, and ``backend.device``."""

FOLDER = "PHASELOOP_FOLDER"
"""The run's folder, where its name has the time in it: one for all processes and restarts."""


def start(words: Sequence[str], job_folder: str, schema: Schema, starting: Starting) -> int:
    """Start the processes of a command line; its exit code.

    Args:
        words: of the command line.
        job_folder: of a multirun: the name of this job's folder.
        schema: what the words make.
        starting: how many processes.
    """
    from phaseloop.engine.backends import launch  # only who starts processes waits for it

    assert schema.run.dir is not None
    folder = schema.run.dir
    variables = {**environment(job_folder), FOLDER: folder}
    if schema.backend.get("name") == XLA and starting.processes > 1:
        # On one machine they are below one process, which torch_xla starts them from.
        variables |= replicas(starting.processes, schema.backend)
        starting = dataclasses.replace(starting, processes=1)
    patience = schema.backend.get("start_timeout", 1800.0)
    with contextlib.ExitStack() as stack:
        each_time = None
        if schema.backend.get("name") == HOROVOD:
            from phaseloop.engine.backends import horovod_process, rendezvous

            horovod_process.package()  # else each process says that it is missing
            variables.update(rendezvous.VARIABLES)
            each_time = stack.enter_context(rendezvous.server(starting.processes))
        return launch.launch(
            command(words),
            starting,
            variables,
            patience=float(patience),
            alike=COMMAND,
            each_time=each_time,
            tell=lambda cause: tell_in(RunFolder(Path(folder)), cause),
        )


def replicas(count: int, backend: Mapping[str, Any]) -> dict[str, str]:
    """What a process has to know that starts replicas of XLA."""
    from phaseloop.engine.backends.surroundings import THREADS, cores

    each = max(1, cores() // count)
    return {
        REPLICAS: str(count),
        DEVICE: str(backend.get("device", "auto")),
        THREADS: os.environ.get(THREADS, str(each)),
    }


def tell_in(folder: RunFolder, cause: str) -> None:
    """Say in the run's status what it failed of: the primary knows only that others were lost.

    The processes are gone. A run that another command has begun in the folder since is left alone.
    """
    status = folder.status()
    if status.get("status") == "failed" and status.get("command") == os.environ[COMMAND]:
        with contextlib.suppress(OSError):  # the disk may be what failed; the console has it
            folder.write_status({**status, "reason": cause})


def command(words: Sequence[str]) -> list[str]:
    """Program and arguments of one process."""
    # As multiprocessing does: -O, -W, -X and the like are the processes' too.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, str(Path(__file__).with_name("worker.py")), *words]


def environment(job_folder: str) -> dict[str, str]:
    """What a process has to know that its words do not say."""
    return {
        PATH: "\n".join(sys.path),
        JOB: job_folder,
        COMMAND: os.environ.get(COMMAND) or secrets.token_hex(8),
    }


def started_again(folder: Path) -> bool:
    """This process was started again, and has to go on with what is in the run's folder.

    So it is where the folder's status has the command's own word, whatever ``run.resume`` says.
    """
    command = os.environ.get(COMMAND)
    if command is None:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return RunFolder(folder).status().get("command") == command
