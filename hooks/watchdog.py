"""Hook ``watchdog``: when a step takes far longer than usual, where every thread of it stands."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

import torch

from phaseloop.engine.errors import ConfigError
from phaseloop.engine.events import EVENTS, Hook
from phaseloop.engine.registry import register_hook
from phaseloop.engine.report import duration
from phaseloop.engine.run_folder import RANKS
from phaseloop.engine.signals import say_within
from phaseloop.engine.task import Task
from phaseloop.engine.trainer import Outcome

_LOOKS = 20  # in the time that is too long
_SELDOM = 5.0  # seconds between two looks, at most
_RECENT = 100  # looks whose steps are the usual ones
_ALONE, _PART = 180.0, 0.6  # seconds with one process; part of the time limit with several
_TO_SAY = 5.0  # seconds for one line: the console may be what hangs
_TO_TELL = 15.0  # and for the file and the line: so may the disk
_TORCH, _PYTHON = (str(Path(file).parent) + os.sep for file in (torch.__file__, os.__file__))


@register_hook("watchdog", default=True)
class Watchdog(Hook):
    """Writes the Python stacks of all threads to ``ranks/stacks-RANK.txt`` in the run's folder.

    Every process watches itself, since all wait when one of them hangs: the one whose stack is
    unlike the others' is the one to look at. A line on the console says so, and once more after
    twice the time, and so on. Where the run has no folder, stacks go to the standard error.

    All that lies between two steps counts, waiting for data, tests and saves too. A thread looks
    now and then whether the run has moved, so a step costs nothing. Time in which this process
    stood still as a whole, by SIGSTOP or with the machine, does not count.

    Args:
        factor: how many times as long as usual, the median over what was seen lately, is too long.
        seconds: less than this is never too long. None: three fifths of ``backend.timeout``, so
            that it speaks before a process gives up waiting for others; with one process 180.
        start_seconds: the same for the first step of each kind of phase, which may compile.
        abort: end the process then, with exit code 1, so that whoever started it may start it
            again; the last whole checkpoint stands.

    Raises:
        ConfigError: a number is out of range.
    """

    only_watches = True

    def __init__(
        self,
        factor: float = 20.0,
        seconds: float | None = None,
        start_seconds: float = 1200.0,
        abort: bool = False,
    ) -> None:
        if factor < 1:
            raise ConfigError("hooks.watchdog.factor", f"{factor} is less than 1")
        for name, value in {"seconds": seconds, "start_seconds": start_seconds}.items():
            if value is not None and not value > 0:
                raise ConfigError(f"hooks.watchdog.{name}", f"{value} is not more than 0")
        self.factor = factor
        self._given = seconds
        self.seconds = _ALONE if seconds is None else seconds
        self.start_seconds = start_seconds
        self.abort = abort
        self._watch: _Watch | None = None

    def on_start(self, task: Task) -> None:
        if self._given is None and task.backend.world_size > 1:
            self.seconds = _PART * task.backend.timeout
        self._watch = _Watch(task, self)
        self._watch.start()

    def on_exception(self, task: Task, error: BaseException) -> None:
        self._end()

    def on_end(self, task: Task, outcome: Outcome) -> None:
        self._end()

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def limit(self, usual: float | None) -> float:
        """Seconds that are too long; ``usual``: of a step, None: none was seen."""
        if usual is None:
            return self.start_seconds
        return max(self.seconds, self.factor * usual)


class _Watch(threading.Thread):
    """The thread that looks. It holds no lock that a process forked meanwhile would wait for.

    A daemon: a process that leaves does not wait for it.
    """

    def __init__(self, task: Task, options: Watchdog) -> None:
        super().__init__(name="phaseloop-watchdog", daemon=True)
        self._task = task
        self._options = options
        self._watched = threading.get_ident()
        shortest = min(options.seconds, options.start_seconds)
        self._pause = min(_SELDOM, shortest / _LOOKS)
        self._over = threading.Event()
        self._file = _file_of(task)
        self._usual: dict[str, deque[float]] = {}  # by phase: seconds of a step, one for each look
        # No phase yet: the first steps may be over before the first look, and count as well.
        self._seen: tuple[object, int, int] = (None, self._steps(), 0)
        self._quiet = 0.0  # seconds since the run was seen to move
        self._next = 0.0  # seconds of quiet to speak at; 0: not spoken yet

    def end(self) -> None:
        """Look no more; come back when the thread is gone, or is held up by a disk or console."""
        self._over.set()
        self.join(_TO_SAY)

    def run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(self._pause):
            now = time.monotonic()
            # More than two pauses: nobody ran here, so nobody can have hung.
            self._quiet += min(now - before, 2 * self._pause)
            before = now
            self._look()

    def _look(self) -> None:
        if self._moved():
            if self._next:
                self._say(f"watchdog: it goes on, after {_shown(self._quiet)}")
            self._quiet = self._next = 0.0
        elif self._quiet >= (self._next or self._options.limit(self._median())):
            self._next = 2 * self._quiet
            # In a thread of its own: what hangs may be the disk or the console.
            teller = threading.Thread(target=self._tell, name="phaseloop-watchdog-2", daemon=True)
            teller.start()
            teller.join(_TO_TELL)
            if self._options.abort:
                self._leave()

    def _moved(self) -> bool:
        """Whether it moved since the last look; then what a step takes is noted."""
        phase, steps = self._task.phase, self._steps()
        seen, self._seen = self._seen, (phase, steps, self._task.accumulator.taken)
        if self._seen == seen:
            return False
        if seen[0] in (phase, None) and steps > seen[1]:
            usual = self._usual.setdefault(phase.name, deque(maxlen=_RECENT))
            usual.append(self._quiet / (steps - seen[1]))
        return True

    def _steps(self) -> int:
        """Steps that were made: in a train phase of the run, else of the phase."""
        task = self._task
        phase, progress = task.phase, task.progress
        if not phase.train:
            return phase.position
        if task.step_facts.takes_window:
            return progress.updates + progress.skipped
        return progress.steps

    def _median(self) -> float | None:
        usual = self._usual.get(self._task.phase.name)
        return statistics.median(usual) if usual else None

    def _tell(self) -> None:
        usual = self._median()
        says = "none has ended yet" if usual is None else f"usual: {_shown(usual)}"
        place = f"after update {self._task.progress.updates}, in phase {self._task.phase.name!r}"
        text = f"no step has ended for {_shown(self._quiet)} ({says}), {place}{self._where()}"
        try:
            if self._file is None:
                _dump(sys.stderr, self._header(text))
                where = "above"
            else:
                self._file.parent.mkdir(exist_ok=True)
                with open(self._file, "a") as file:
                    _dump(file, self._header(text))
                where = f"in {self._file}"
        except (OSError, ValueError) as error:  # ValueError: no standard error that has a file
            where = f"nowhere: {type(error).__name__}: {error}"
        self._say(f"watchdog: {text}; the stacks of all its threads are {where}")

    def _header(self, text: str) -> str:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        rank = self._task.backend.rank
        return f"{now}, rank {rank}, process {os.getpid()} on {socket.gethostname()}: {text}\n"

    def _where(self) -> str:
        """What the run is at: the innermost hook, and the innermost line outside of libraries."""
        frame = sys._current_frames().get(self._watched)
        codes = _codes(self._task)
        line, hook = "", ""
        while frame is not None:
            code = frame.f_code
            if not line and not _is_library(code.co_filename):
                line = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
            hook = hook or codes.get(code, "")
            frame = frame.f_back
        what = "waiting for data" if self._task.signals.waiting else hook and f"in {hook}"
        return "".join(f", {part}" for part in (what, line and f"at {line}") if part)

    def _say(self, text: str) -> None:
        say_within(_TO_SAY, text, logging.WARNING)

    def _leave(self) -> None:
        """End the process, unless the run has moved or ended in the meantime."""
        # The others' stacks first: whoever starts the processes ends all when one has left.
        if self._over.wait(4 * self._pause) or self._moved():
            self._quiet = self._next = 0.0
            return
        reason = "watchdog: no step has ended: leaving unsaved; the newest checkpoint stands"
        self._say(reason)
        writing = threading.Thread(target=self._write_status, args=(reason,), daemon=True)
        writing.start()
        writing.join(_TO_SAY)
        os._exit(1)

    def _write_status(self, reason: str) -> None:
        task = self._task
        if task.primary and task.folder is not None and task.running_status is not None:
            task.folder.write_status(
                {**task.running_status(), "status": "failed", "reason": reason}
            )


def _shown(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else duration(seconds)


def _is_library(file: str) -> bool:
    """A file of torch's or of Python itself; also of the modules that it has in its program."""
    installed = "site-packages" in file or "dist-packages" in file
    return file.startswith((_TORCH, "<frozen")) or (file.startswith(_PYTHON) and not installed)


def _file_of(task: Task) -> Path | None:
    """Where stacks go; None: this run leaves nothing in a folder."""
    if task.run.dir is None or task.debug.fast is not None or task.test_only:
        return None
    return Path(task.run.dir).absolute() / RANKS / f"stacks-{task.backend.rank}.txt"


def _dump(file: IO[str], header: str) -> None:
    file.write(header)
    file.flush()  # what follows is written past Python's own buffer
    faulthandler.dump_traceback(file, all_threads=True)


def _codes(task: Task) -> dict[Any, str]:
    """The code of every hook's methods, and what to call it."""
    return {
        method.__code__: f"hooks.{name}.{event}"
        for name, hook in task.hooks.hooks.items()
        for event in EVENTS
        if (method := getattr(type(hook), event)) is not getattr(Hook, event)
        and hasattr(method, "__code__")
    }
