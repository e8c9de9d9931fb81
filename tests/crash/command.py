"""A command line of a scenario: forked from the helper of the tests, or true; and how it ends."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from tests.crash.faulty_fs import Plan
from tests.rigs import cli, process, ranks

WORDS = ("config=crash",)
LIMIT = 180.0
PATIENCE = 6.0
"""Seconds in which the other processes have to end when one has failed."""
_JOINING = ("in init_process_group", "in new_group")
"""Where a process waits for others that may still come; a launcher knows that they will not."""


def lay_out(folder: Path, config: Mapping[str, Any]) -> Path:
    """A folder to work in: the experiment ``crash`` and the user's module."""
    experiments = folder / "configs" / "config"
    experiments.mkdir(parents=True)
    text = yaml.safe_dump(dict(config), sort_keys=False)
    (experiments / "crash.yaml").write_text(f"# @package _global_\n{text}")
    shutil.copy(Path(__file__).with_name("crash_probe.py"), folder)
    return folder


def main(
    folder: Path, words: Sequence[str], environment: Mapping[str, str], calls: int = 0
) -> None:
    """In a new process: what ``python tools/run.py`` does, killed at the ``calls``-th call."""
    from phaseloop.tools import run

    os.chdir(folder)
    os.environ.update(environment)
    run.composing.compose = _kept(run.composing.compose)
    if calls:
        process.after_calls(calls)
    try:
        run.main(words)
    finally:
        sys.setprofile(None)


def main_of_rank(
    folder: Path, words: Sequence[str], environment: Mapping[str, str], calls: int, rank: int
) -> None:
    """In each of several new processes: the same; what goes wrong does so in this rank."""
    here = os.environ["RANK"] == str(rank)
    main(folder, words, environment if here else {}, calls if here else 0)


def _kept(compose: Callable[[Sequence[str]], Any]) -> Callable[[Sequence[str]], Any]:
    """Composing what the same words gave before: it takes longer than the training."""

    def composed(words: Sequence[str]) -> Any:
        file = Path(f"composed-{hashlib.sha256(repr(list(words)).encode()).hexdigest()[:8]}")
        if not file.exists():
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pickle.dumps(compose(words)))
            partial.rename(file)  # whole, though this process may be killed at any instant
        return pickle.loads(file.read_bytes())

    return composed


class Command:
    """A command line that has been started.

    Args:
        folder: where it works.
        words: its words.
        faults: what goes wrong in its file system.
        calls: it is killed at this call; see :func:`tests.rigs.process.after_calls`.
        true: a process of its own from the beginning: two seconds more.
        processes: as its configuration says; each is started here as by a launcher, a true command
            starts them itself.
        rank: of several, the one to which faults and calls belong.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str] = WORDS,
        faults: Plan | None = None,
        calls: int = 0,
        true: bool = False,
        processes: int = 1,
        rank: int = 0,
    ) -> None:
        environment = faults.environment() if faults is not None else {}
        self.started = time.monotonic()
        self._true: subprocess.Popen[str] | None = None
        self._stack = ExitStack()
        if true:
            self._true = cli.start(words, folder, environment)
        elif processes == 1:
            self._forks = [process.start(main, folder, words, environment, calls)]
        else:
            told = (folder, words, environment, calls, rank)
            self._forks = self._stack.enter_context(
                ranks.started(main_of_rank, *told, processes=processes)
            )

    @property
    def pid(self) -> int:
        """The process id, of several processes the primary's."""
        if self._true is None:
            return self._forks[0].pid
        return _ranks_below(self._true.pid).get(0, self._true.pid)

    def send(self, number: int, rank: int | None = None) -> None:
        """Send it a signal, of several processes one of them or all."""
        if self._true is None:
            for one in self._forks if rank is None else [self._forks[rank]]:
                one.send(number)
        elif rank is None or rank not in (below := _ranks_below(self._true.pid)):
            self._true.send_signal(number)
        else:
            os.kill(below[rank], number)

    def wait(self) -> tuple[int, str]:
        """Its exit code (minus the number of the signal that ended it), and what it printed."""
        (one,) = self.ends()
        return one

    def ends(self) -> list[tuple[int, str]]:
        """The same of each of its processes, by rank; of a true one its own.

        Raises:
            AssertionError: it hangs, or one has failed and another does not end with it.
        """
        if self._true is None:
            with self._stack:
                return _ends(self._forks)
        try:
            output, _ = self._true.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self._true.send_signal(signal.SIGABRT)
            self._true.kill()
            raise AssertionError(f"the command hangs:\n{self._true.communicate()[0]}") from None
        return [(self._true.returncode, output)]


def _ends(running: list[process.Running]) -> list[tuple[int, str]]:
    ended: dict[int, process.Ended] = {}
    hanging: list[int] = []
    until = time.monotonic() + LIMIT
    while len(ended) < len(running):
        for rank, one in enumerate(running):
            if rank not in ended and (found := one.ended(0.02)) is not None:
                ended[rank] = found
                if found.code:  # no launcher is there to end the others
                    until = min(until, time.monotonic() + PATIENCE)
        if time.monotonic() > until:
            for rank, one in enumerate(running):
                if rank not in ended:
                    one.dump()
                    time.sleep(0.2)
                    ended[rank] = process.Ended(1, None, one.kill())
                    if not any(place in ended[rank].output for place in _JOINING):
                        hanging.append(rank)
    if hanging:
        shown = ranks.outputs([ended[rank].output for rank in range(len(running))])
        raise AssertionError(f"rank {hanging} hangs:\n{shown}")
    return [(ended[rank].code, ended[rank].output) for rank in range(len(running))]


def _ranks_below(launcher: int) -> dict[int, int]:
    """Process ids by rank of those that a true command line has started."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if line.startswith(b"RANK="):
                found[int(line.removeprefix(b"RANK="))] = int(pid)
    return found


def run(folder: Path, words: Sequence[str] = WORDS, **options: Any) -> tuple[int, str]:
    """A command line, to its end; of several processes the first one that failed."""
    ends = Command(folder, words, **options).ends()
    return next((end for end in ends if end[0]), ends[0])
