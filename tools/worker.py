"""Worker: one of the processes that a launcher starts; in it the same command line runs.

It is started as a file, and looks for modules where its launcher did.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# Named in launching.py too, which cannot be imported before the first is read.
_PATH = "PHASELOOP_PATH"
_JOB = "PHASELOOP_JOB"
_REPLICAS = "PHASELOOP_REPLICAS"  # of XLA

_SIGNALLED = 128
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def main() -> None:
    """Run the command line and exit with its code; a stop that was asked for is no failure."""
    end_with(int(os.environ["PHASELOOP_PARENT"]))
    # Until the run has handlers of its own, a Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path[:] = os.environ[_PATH].split("\n")
    from phaseloop.engine import outcomes
    from phaseloop.tools import run

    if _REPLICAS in os.environ:
        from phaseloop.engine.backends.xla import launch

        code = run.exit_code(lambda: launch.run(_command))
    else:
        code = _command()
    if code > _SIGNALLED and outcomes.leave(outcomes.Outcome(code)):
        code = run.DONE
    sys.exit(code)


def _command() -> int:
    """The command line, in this process or in each of its replicas."""
    from phaseloop.tools import run

    return run.run(sys.argv[1:], os.environ.get(_JOB, ""))


def end_with(parent: int) -> None:
    """This process ends when its parent does, even when that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
