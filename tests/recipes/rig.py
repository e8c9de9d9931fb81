"""What every recipe is put through, from the command line in new processes, on its short form."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

from tests.recipes import interrupt
from tests.rigs import cli, equal

QUIET = ["hooks.console=null", "hooks.progress=null", "hooks.curves=null", "hooks.tensorboard=null",
         "run.threads=1"]  # fmt: skip
KILLED = f"hooks.killed={{_target_: {interrupt.__name__}.KillAt}}"
LIMIT = 300.0
"""Seconds for one run; far more than any short form needs."""


def train(folder: Path, *words: str, code: int = 0) -> str:
    """Train ``words`` (``config=NAME``, overrides) in ``folder/run``; what was printed.

    The current folder of the run is ``folder``.

    Raises:
        AssertionError: it did not exit with ``code``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended = cli.forked([*QUIET, "run.dir=run", *words], folder, timeout=LIMIT)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == code, f"exit code {ended.returncode}\n{printed}"
    return printed


def final(folder: Path, *words: str) -> dict[str, Any]:
    """The same; the metrics at its end."""
    train(folder, *words)
    status = json.loads((folder / "run/status.json").read_text())
    assert status["status"] == "finished", status
    return dict(status["final"])


def resumes_exactly(folder: Path, *words: str, at: int) -> None:
    """A run that is killed at update ``at``, and run again, ends as one that was never disturbed.

    Args:
        at: an update behind the first save, and before the last, which ``words`` have to see to:
            ``hooks.checkpoint.every_updates=N``.

    Raises:
        AssertionError: it does not, and what differs.
    """
    # Not in the background: a slow disk would not have the save when the process is killed.
    waits = "hooks.checkpoint.background=false"
    given = [*words, f"allow_targets=[{interrupt.__name__}]", KILLED, waits]
    final(folder / "whole", *given)
    with mock.patch.dict(os.environ, {interrupt.AT: str(at)}):
        train(folder / "cut", *given, code=-signal.SIGKILL)
    train(folder / "cut", *given)
    started_at = [int(line) for line in (folder / "cut" / interrupt.STARTS).read_text().split()]
    assert len(started_at) == 2 and 0 == started_at[0] < started_at[1] < at, started_at
    equal.assert_eq(folder / "whole/run", folder / "cut/run")


def two_processes(folder: Path, *words: str) -> dict[str, Any]:
    """The metrics of the same training on two processes of DDP."""
    return final(folder, *words, "backend=ddp", "backend.processes=2")
