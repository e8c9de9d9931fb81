"""Rendezvous: Horovod's own server, in the launcher, at which its processes find one another.

Our launcher holds one, anew whenever it starts processes; horovodrun does as well. There the
processes learn from it, too, where the primary's store is.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch.distributed import Store, TCPStore

from phaseloop.engine.errors import ConfigError, PeerError

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
VARIABLES = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_HOSTNAME": "localhost",
    ADDRESS: "127.0.0.1",
    PORT: "",
}
"""What names a server on this machine, but for its port."""

if sys.platform == "linux":  # else it asks for the address that this machine's name has
    VARIABLES["HOROVOD_GLOO_IFACE"] = "lo"

_KEY = "/phaseloop/store"
_LOOK = 0.05  # seconds between two looks
_ANSWER = 10.0  # seconds that the server has for one


@contextlib.contextmanager
def server(processes: int) -> Iterator[Callable[[], dict[str, str]]]:
    """What starts a server, in place of the one before, and gives the variables that name it.

    None listens any more when the block is left.

    Args:
        processes: on this machine, and in all.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    running: list[RendezvousServer] = []

    def start() -> dict[str, str]:
        stop()
        one = RendezvousServer()
        port = one.start()
        running.append(one)
        one.init(get_host_assignments(parse_hosts(f"localhost:{processes}"), processes))
        return {**VARIABLES, PORT: str(port)}

    def stop() -> None:
        while running:
            one = running.pop()
            one.stop()  # leaves its socket to the collector
            one._httpd.socket.close()

    try:
        yield start
    finally:
        stop()


def place() -> str:
    """``HOST:PORT`` of the server."""
    return f"{os.environ[ADDRESS]}:{os.environ[PORT]}"


def primarys_store(primary: bool, patience: timedelta) -> Store:
    """The store that the primary opens, and the others hear of from the server.

    Args:
        primary: this process is.
        patience: how long to wait for it.

    Raises:
        ConfigError: the server cannot be reached.
        PeerError: the primary did not come.
    """
    if primary:
        store = TCPStore(_own_address(), 0, None, True, patience, wait_for_workers=False)
        _ask("PUT", f"{store.host}:{store.port}")
        return store
    until = time.monotonic() + patience.total_seconds()
    while (found := _ask("GET")) is None:
        if time.monotonic() > until:
            raise PeerError(
                f"rank 0 did not come within {patience.total_seconds():g} s (backend.start_timeout)"
            )
        time.sleep(_LOOK)
    host, _, port = found.rpartition(":")
    return TCPStore(host, int(port), None, False, patience, wait_for_workers=False)


def _ask(method: str, value: str | None = None) -> str | None:
    """What the server answers; None: it has nothing yet."""
    host, port = os.environ[ADDRESS], os.environ[PORT]
    try:
        connection = http.client.HTTPConnection(host, int(port), timeout=_ANSWER)
        connection.request(method, _KEY, body=value)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        text = f"Horovod's rendezvous server at {place()} cannot be reached: {error}"
        raise ConfigError("backend", text) from None
    return text if answer.status == http.client.OK else None


def _own_address() -> str:
    """The address of this machine from which the server is reached: the others reach it, too."""
    host, port = os.environ[ADDRESS], int(os.environ[PORT])
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
