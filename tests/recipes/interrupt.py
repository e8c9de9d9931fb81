"""A hook that kills its own process, as no handler can notice, at a chosen update.

It also notes where each start of the run began.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from phaseloop import Hook, Task

AT = "PHASELOOP_TESTS_KILL_AT"
"""A variable with the update; no option of the hook, since those may not change on a resume."""

STARTS = "starts.txt"
"""A file in the current folder: for each start a line with the updates that were done."""


class KillAt(Hook):
    """SIGKILL once so many updates are done, before anything of the last one is saved."""

    def on_start(self, task: Task) -> None:
        if task.primary:
            with Path(STARTS).open("a") as file:
                file.write(f"{task.progress.updates}\n")

    def on_step(self, task: Task) -> None:
        if task.updated and str(task.progress.updates) == os.environ.get(AT):
            os.kill(os.getpid(), signal.SIGKILL)
