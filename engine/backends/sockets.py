"""Sockets: gloo connects every process with every other, once for each of its two groups."""

from __future__ import annotations

import logging
import resource

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
