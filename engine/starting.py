"""Starting: whether this process does the work alone, is one of several, or starts them.

The keys of ``backend`` that say how many there are belong to whoever starts processes; a backend
never sees them. Imports no torch, so that a wrong number is told at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from phaseloop.engine.config.typed import to_dataclass
from phaseloop.engine.errors import ConfigError

AUTO, ALONE, SEVERAL = "auto", "single", "ddp"
RENDEZVOUS = "PHASELOOP_RENDEZVOUS"
"""HOST:PORT where machines meet, from whoever started this process on several of them."""


@dataclass
class Starting:
    """What is started.

    Args:
        processes: on each machine.
        nodes: machines; the same command is given on each.
        rendezvous: ``HOST:PORT`` where they meet: one of them, and a port that is free there.
        restarts: how often all processes are started again after a failure; they go on from the
            newest whole checkpoint.
    """

    processes: int = 1
    nodes: int = 1
    rendezvous: str | None = None
    restarts: int = 0

    @property
    def several(self) -> bool:
        """There is more than this process to start, or somebody to watch over it."""
        return self.processes > 1 or self.nodes > 1 or self.restarts > 0

    def check(self, key: str = "backend", address: bool = True) -> None:
        """Raises ConfigError for a number out of range, and for an address that is missing.

        Args:
            address: one has to be there.
        """
        for name, least in {"processes": 1, "nodes": 1, "restarts": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{key}.{name}", f"{getattr(self, name)} is less than {least}")
        if self.rendezvous is not None and self.nodes == 1:
            raise ConfigError(f"{key}.rendezvous", f"is where machines meet, and {key}.nodes is 1")
        if self.rendezvous is not None or (self.nodes > 1 and address):
            self._check_address(f"{key}.rendezvous")

    def _check_address(self, key: str) -> None:
        if self.rendezvous is None:
            raise ConfigError(
                key, f"{self.nodes} machines have to meet somewhere: give HOST:PORT of one of them"
            )
        host, _, port = self.rendezvous.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ConfigError(key, f"{self.rendezvous!r} is not HOST:PORT")


KEYS = tuple(f.name for f in fields(Starting))


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
