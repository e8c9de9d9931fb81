"""Memory use: how much of the device's, or of the host's, a run has taken."""

from __future__ import annotations

import os
import resource
import sys

from phaseloop.engine.backends.base import Backend
from phaseloop.engine.report import size


def described(backend: Backend) -> str:
    """``peak 1.2 GB`` on a device that counts it, else what this process holds: ``412 MB``."""
    peak = backend.memory()
    return f"peak {size(peak)}" if peak else size(resident())


def resident() -> int:
    """Bytes of this process that lie in memory; where the system does not tell, at most so far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
