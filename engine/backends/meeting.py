"""Meeting: an end to a wait for other machines that torch itself would never give up.

Where something else has the port, torch waits for its answer inside C++, where neither its own time
limit nor a signal's handler reaches. So a thread looks at both.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
import time
from types import TracebackType

_TO_HANDLE = 3.0
"""Seconds for the main thread to heed a signal by itself, where it can."""
_SIGNALLED = 128


class Meeting:
    """While it is entered, by the main thread, machines look for one another.

    Args:
        where: HOST:PORT.
        seconds: after which this process ends, with exit code 1.
        folder: removed then.
    """

    def __init__(self, where: str, seconds: float, folder: str) -> None:
        self._where = where
        self._until = time.monotonic() + seconds
        self._folder = folder
        self._over = threading.Event()

    def __enter__(self) -> Meeting:
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        self._write = write
        self._before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._look, name="phaseloop-meeting", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._before)
        self._over.set()
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._write)
        os.close(self._read)

    def _look(self) -> None:
        left = self._until - time.monotonic()
        came, _, _ = select.select([self._read], [], [], max(0.0, left))
        if not came:
            self._leave(
                1,
                f"no machine answers at {self._where} as one that waits for others does: has "
                f"another program that port? Choose another backend.rendezvous",
            )
        number = os.read(self._read, 1)[0]
        if not self._over.wait(_TO_HANDLE):
            self._leave(_SIGNALLED + number, "")

    def _leave(self, code: int, text: str) -> None:
        if text:
            print(text, file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(code)
