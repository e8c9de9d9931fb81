"""Processes: whether this process does the work alone, is one of several, or starts them.

The keys of ``backend`` that say how many there are belong to whoever starts processes; a backend
never sees them. Imports no torch, so that a wrong number is told at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phaseloop.engine.config.typed import to_dataclass
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.starting import KEYS, Starting

AUTO, ALONE, SEVERAL = "auto", "single", "ddp"
RENDEZVOUS = "PHASELOOP_RENDEZVOUS"
"""HOST:PORT where machines meet, from whoever started this process on several of them."""


def asked_for(backend: Mapping[str, Any], address: bool = True) -> Starting:
    """What a configuration asks for, whoever started this process.

    Args:
        backend: the section of the configuration.
        address: machines need one where they meet.

    Raises:
        ConfigError: a key is wrong.
    """
    given = {key: backend[key] for key in KEYS if key in backend}
    if given.get("rendezvous") is None and given.get("nodes", 1) != 1 and RENDEZVOUS in os.environ:
        given["rendezvous"] = os.environ[RENDEZVOUS]
    starting = to_dataclass(Starting, given, "backend")
    starting.check(address=address)
    for name in ("processes", "nodes"):
        if backend.get("name") == ALONE and getattr(starting, name) > 1:
            raise ConfigError(f"backend.{name}", "single is one process: use ddp or fsdp")
    return starting


def wanted(backend: Mapping[str, Any]) -> Starting | None:
    """What this process has to start; None: it does the work itself, alone or as one of several.

    Raises:
        ConfigError: a key is wrong, or says another number than the launcher that started us.
    """
    from phaseloop.engine.backends import joining  # with it torch: not before the keys are right

    starting = asked_for(backend)
    joined = joining.found() if backend.get("name") != ALONE else joining.started_by_us()
    if joined is None:
        return starting if starting.several else None
    if starting.processes not in (1, joined.local_world_size):
        raise ConfigError(
            "backend.processes",
            f"is {starting.processes}, and {joined.by} started {joined.local_world_size} on this "
            f"machine: let it start as many, or leave the key out",
        )
    return None


def resolved(backend: Mapping[str, Any]) -> dict[str, Any]:
    """The section without the keys of who starts, and with the backend that ``auto`` means."""
    from phaseloop.engine.backends import joining

    rest = {key: value for key, value in backend.items() if key not in KEYS}
    if rest.get("name") == AUTO:
        rest["name"] = ALONE if joining.found() is None else SEVERAL
    return rest
