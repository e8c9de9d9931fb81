"""TensorBoard: its server over a folder, asked over HTTP as its page asks."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT = 90.0
"""Seconds until it has to serve; it needs about five."""


class Board:
    """A server that runs.

    Args:
        url: of its page.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: Any = None, **query: str) -> Any:
        """What it answers under ``/data/``, as JSON.

        Args:
            path: ``plugin/scalars/tags``.
            body: sent as JSON; None: it is only asked.
        """
        found = self.raw(path, None if body is None else json.dumps(body).encode(), **query)
        return json.loads(found)

    def raw(self, path: str, body: bytes | None = None, **query: str) -> bytes:
        """The same in bytes."""
        words = f"?{urllib.parse.urlencode(query)}" if query else ""
        kind = {} if body is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}data/{path}{words}", body, kind)
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: bytes = answer.read()
            return found


@contextlib.contextmanager
def serving(folder: Path, fast: bool = True) -> Iterator[Board]:
    """A server over a folder of runs, on a free port of this machine, all of it read.

    Args:
        fast: read by its data server, which is its own default where that is installed; False: by
            its Python reader.
    """
    command = [
        sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1",
        "--port", "0", "--load_fast", "true" if fast else "false", "--reload_interval", "1",
        "--samples_per_plugin", "images=1000,text=1000,histograms=1000,scalars=10000",
    ]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    found = threading.Event()

    def listen() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            said.append(line)
            if "Press CTRL+C" in line:
                found.set()

    reader = threading.Thread(target=listen, daemon=True)
    reader.start()
    try:
        until = time.monotonic() + LIMIT
        while not found.wait(0.1):
            assert server.poll() is None and time.monotonic() < until, "".join(said)
        match = re.search(r"http://127\.0\.0\.1:\d+/", "".join(said))
        assert match is not None, "".join(said)
        yield Board(match[0])
    finally:
        server.terminate()
        server.wait(20)
        reader.join(20)
