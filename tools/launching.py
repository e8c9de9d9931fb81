"""Launching: the command line starts its own processes, each with the same words."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from phaseloop.engine.config.schema import Schema
from phaseloop.engine.starting import Starting

PATH = "PHASELOOP_PATH"
"""Where modules are looked for, a folder a line."""

JOB = "PHASELOOP_JOB"
"""Of a multirun: the name of this job's folder."""

FOLDER = "PHASELOOP_FOLDER"
"""The run's folder, where its name has the time in it: one for all processes and restarts."""

SINCE = "PHASELOOP_SINCE"
"""When the first process was started, in seconds since 1970: what is younger in the run's folder
is this command's own, which a restart goes on with, whatever ``run.resume`` says."""


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
    patience = schema.backend.get("start_timeout", 1800.0)
    return launch.launch(
        command(words),
        starting,
        {**environment(job_folder), FOLDER: schema.run.dir},
        patience=float(patience),
    )


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
        SINCE: os.environ.get(SINCE) or str(time.time()),
    }


def started_again(folder: Path) -> bool:
    """This process was started again, and has to go on with what is in the run's folder."""
    since = os.environ.get(SINCE)
    if since is None:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    try:
        return (folder / "resolved.yaml").stat().st_mtime >= float(since)
    except OSError:
        return False
