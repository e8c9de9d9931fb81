"""Terminals: one in the place of this process's output, and one that a command runs in."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pexpect
import pyte
import pytest

from tests.rigs import cli

LIMIT = 120.0
"""Seconds that what is waited for gets; far more than it needs."""


class Terminal:
    """A pseudo-terminal in the place of ``sys.stdout``; :meth:`close` gives all that was printed.

    Args:
        width: columns.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int = 160) -> None:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(width))
        self._far, near = os.openpty()
        self._chunks: list[bytes] = []
        self.stdout = io.TextIOWrapper(os.fdopen(near, "wb", 0), write_through=True)
        monkeypatch.setattr(sys, "stdout", self.stdout)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._far, 65536)
            except OSError:  # the near end is closed
                return
            self._chunks.append(chunk)

    def close(self) -> str:
        """Close it."""
        self.stdout.close()
        self._reader.join()
        os.close(self._far)
        return b"".join(self._chunks).decode()


class Session:
    """The command line in a terminal, and the screen that one would look at.

    Args:
        words: of the command.
        cwd: where it runs.
        width: columns.
    """

    def __init__(self, words: Sequence[str], cwd: Path, width: int = 80, height: int = 50) -> None:
        unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
        variables = {k: v for k, v in cli.environment().items() if k not in unset}
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self._job = pexpect.spawn(
            sys.executable,
            [str(cli.RUN), *words],
            cwd=str(cwd),
            env={**variables, "TERM": "xterm-256color"},  # type: ignore[arg-type]
            dimensions=(height, width),
        )
        self.code: int | None = None

    @property
    def lines(self) -> list[str]:
        """What stands on the screen now, without empty lines."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def until(self, there: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the screen is so; its lines.

        Raises:
            AssertionError: the command has ended, or it takes too long.
        """
        deadline = time.monotonic() + LIMIT
        while not there(self.lines):
            shown = "\n".join(self.lines)
            assert self._read(), f"it ended with {self.code}:\n{shown}"
            assert time.monotonic() < deadline, f"it took too long:\n{shown}"
        return self.lines

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._job.sendintr()

    def end(self) -> list[str]:
        """Wait for the command's end; the lines on the screen."""
        deadline = time.monotonic() + LIMIT
        while self._read():
            assert time.monotonic() < deadline, "it took too long:\n" + "\n".join(self.lines)
        return self.lines

    def close(self) -> None:
        """End the command where it still runs."""
        self._job.close(force=True)

    def _read(self) -> bool:
        """Take what there is to read; False: the command has ended."""
        try:
            self._stream.feed(self._job.read_nonblocking(1 << 16, 0.1))
        except pexpect.TIMEOUT:
            pass
        except pexpect.EOF:
            self._job.wait()
            self.code = self._job.exitstatus
            return False
        return True
