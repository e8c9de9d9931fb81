"""A real S3 server on this machine, and a wire to it that can be cut.

The server is moto's, in a process of its own; it forgets everything when it ends.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import fsspec

KEY, SECRET = "an-access-key", "a-secret-word"

_SERVE = """
import sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Server:
    """The server; one serves a whole test session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,  # it ends when this one does
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        # The first line that is a number: it also says that it is starting.
        self.port = next(int(line) for line in self._process.stdout if line.strip().isdigit())

    @property
    def options(self) -> dict[str, Any]:
        """What ``run.storage_options`` has to be."""
        return options(self.port)

    @property
    def fs(self) -> Any:
        """The file system, seen past phaseloop."""
        found = fsspec.filesystem("s3", **self.options)
        found.invalidate_cache()
        return found

    def bucket(self) -> str:
        """A new bucket's name."""
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        self.fs.mkdir(name)
        return name

    def keys(self, url: str) -> list[str]:
        """Every object below a URL, by its path from there."""
        root = url.removeprefix("s3://")
        return sorted(key[len(root) + 1 :] for key in self.fs.find(root))

    def fetch(self, url: str, folder: Path) -> None:
        """Copy all objects below a URL to a folder."""
        for key in self.keys(url):
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(self.fs.cat_file(f"{url}/{key}"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def options(port: int) -> dict[str, Any]:
    """Storage options for a server at a port, which is asked once and no more."""
    return {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": f"http://127.0.0.1:{port}",
        "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 5},
    }


class Wire:
    """A port of this process that leads to a server, until it is cut.

    Args:
        port: the server's.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._ends: list[socket.socket] = []
        self._left: int | None = None
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, count: int) -> None:
        """Cut it for good when so many more bytes have gone to the server."""
        self._left = count

    def cut(self) -> None:
        """Cut it now: what is under way breaks off, and nobody gets through any more."""
        for end in [self._listener, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                self._ends += [near, far]
                for pair in [(near, far, True), (far, near, False)]:
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counts and self._left is not None:
                    with self._lock:
                        self._left -= len(data)
                    if self._left < 0:
                        target.sendall(data[: len(data) // 2])
                        self.cut()
                        return
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
