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
from pathlib import Path
from typing import Any

import yaml

from tests.crash.faulty_fs import Plan
from tests.rigs import cli, process

WORDS = ("config=crash",)
LIMIT = 60.0


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
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str] = WORDS,
        faults: Plan | None = None,
        calls: int = 0,
        true: bool = False,
    ) -> None:
        environment = faults.environment() if faults is not None else {}
        self.started = time.monotonic()
        self._true: subprocess.Popen[str] | None = None
        if true:
            self._true = cli.start(words, folder, environment)
        else:
            self._fork = process.start(main, folder, words, environment, calls)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._fork.pid if self._true is None else self._true.pid

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self._true is not None:
            self._true.send_signal(number)
        else:
            self._fork.send(number)

    def wait(self) -> tuple[int, str]:
        """Its exit code (minus the number of the signal that ended it), and what it printed."""
        if self._true is None:
            ended = self._fork.wait(LIMIT)
            return ended.code, ended.output
        try:
            output, _ = self._true.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self._true.send_signal(signal.SIGABRT)
            self._true.kill()
            raise AssertionError(f"the command hangs:\n{self._true.communicate()[0]}") from None
        return self._true.returncode, output


def run(folder: Path, words: Sequence[str] = WORDS, **options: Any) -> tuple[int, str]:
    """A command line, to its end."""
    return Command(folder, words, **options).wait()
