"""Sockets: gloo connects every process with every other, once for each of its two groups."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import stat
from collections.abc import Set

log = logging.getLogger("phaseloop")

_OTHERS = 1024
"""Files that a process may have open beside: workers' pipes, shards of the data, logs."""


def make_room(processes: int) -> None:
    """Let this process have as many files open as its connections need.

    Seen with torch 2.13: 2 * processes + 1. The usual limit, 1,024 files, would end a run of some
    five hundred processes at its start; a process may raise it as far as the machine allows.
    """
    wanted = 2 * processes + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted or processes * 2 + 1 < soft // 2:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d processes have %d connections each, and this machine allows %d open files for all "
            "that a process does: raise its hard limit (ulimit -Hn)",
            processes,
            2 * processes + 1,
            allowed,
        )


Sockets = Set[tuple[int, int]]
"""Those of this process: each one's file and what tells it from a later one with that number."""


def open_here() -> Sockets:
    """All that are open in this process."""
    found = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the one that the list was read from
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found


def disconnect(connections: Sockets) -> None:
    """What is under way by these ends at once, here and at their other ends, with an error."""
    for number, _ in connections & open_here():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)  # one that listens would abort the process
