"""One process: what a tool that works alone says to keys and launchers that would start more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phaseloop.engine.config import places
from phaseloop.engine.config.processes import asked_for, started
from phaseloop.engine.config.schema import Schema
from phaseloop.engine.errors import ConfigError


def check_launcher(tool: str, key: str = "backend") -> None:
    """Raises ConfigError where a launcher has started this process as one of several."""
    if not started():
        return
    from phaseloop.engine.backends import joining  # with it torch: not before the keys are right

    joined = joining.found()
    if joined is not None and joined.world_size > 1:
        raise ConfigError(
            key,
            f"{tool} works in one process, and {joined.by} started {joined.world_size}: start it "
            f"without {joined.by}",
        )


def check_keys(schema: Schema, tool: str) -> None:
    """Raises ConfigError for keys that ask for several processes, or for a job elsewhere."""
    check_launch(schema.launch, tool)
    check_backend(schema.backend, tool)


def check_launch(launch: Mapping[str, Any], tool: str) -> None:
    """Raises ConfigError for keys that ask for a job elsewhere."""
    if places.job(launch) is not None:
        raise ConfigError("launch", f"{tool} does its work here: no job is submitted")


def check_backend(backend: Mapping[str, Any], tool: str) -> None:
    """Raises ConfigError for keys that ask for several processes."""
    starting = asked_for(backend, address=False)
    for name, alone in {"processes": 1, "nodes": 1, "restarts": 0}.items():
        if (value := getattr(starting, name)) != alone:
            raise ConfigError(
                f"backend.{name}", f"is {value}, and {tool} works in one process: leave it out"
            )
