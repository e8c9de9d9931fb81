"""Starting: how many processes one command starts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from phaseloop.engine.errors import ConfigError


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
