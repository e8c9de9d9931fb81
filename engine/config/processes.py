"""Processes: whether this process does the work alone, is one of several, or starts them.

The keys of ``backend`` that say how many there are belong to whoever starts processes; a backend
never sees them. Imports no torch, so that a wrong number is told at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from phaseloop.engine.config.typed import convert, to_dataclass
from phaseloop.engine.errors import ConfigError
from phaseloop.engine.starting import KEYS, Starting

AUTO, ALONE, SEVERAL, HOROVOD, XLA = "auto", "single", "ddp", "horovod", "xla"
RENDEZVOUS = "PHASELOOP_RENDEZVOUS"
"""HOST:PORT where machines meet, from whoever started this process on several of them."""

_STARTED = {"RANK", "SLURM_STEP_ID", "HOROVOD_RANK"}
_AGAIN = {
    "torchrun": "by its --max-restarts",
    "slurm": "by sbatch --requeue or launch=slurm",
    "horovodrun": "which it does not: give the same command again",
    XLA: "by whoever called torch_xla.launch",
}
_LONGEST = 10**9
"""Seconds, some 30 years: what the parts of torch that wait can still count."""


def asked_for(backend: Mapping[str, Any], address: bool = True) -> Starting:
    """What a configuration asks for, whoever started this process.

    Args:
        backend: the section of the configuration.
        address: machines need one where they meet; not said where a launcher has started this
            process, which gives them one.

    Raises:
        ConfigError: a key is wrong.
    """
    if "start_timeout" in backend:  # the launcher's, too: machines have to meet in it
        _check_seconds("backend.start_timeout", backend["start_timeout"])
    given = {key: backend[key] for key in KEYS if key in backend}
    if given.get("rendezvous") is None and given.get("nodes", 1) != 1 and RENDEZVOUS in os.environ:
        given["rendezvous"] = os.environ[RENDEZVOUS]
    starting = to_dataclass(Starting, given, "backend")
    starting.check(address=address and not started())
    _check_fit(backend, starting)
    return starting


def _check_fit(backend: Mapping[str, Any], starting: Starting) -> None:
    """Raises ConfigError where a backend does not work on so many processes or machines."""
    backend_name = backend.get("name")
    for key in ("processes", "nodes"):
        count = getattr(starting, key)
        if count > 1 and backend.get("spmd") is True:
            raise ConfigError(
                "backend.spmd",
                f"by it one process has all devices, and backend.{key} is {count}: leave one out",
            )
        if count > 1 and backend_name == ALONE:
            raise ConfigError(f"backend.{key}", "single is one process: use ddp or fsdp")
    if starting.nodes > 1 and backend_name == HOROVOD:
        raise ConfigError(
            "backend.nodes",
            f"is {starting.nodes}, and Horovod's processes on several machines are started by "
            f"horovodrun: horovodrun -np N -H host1:M,host2:M --gloo python tools/run.py ...",
        )
    if starting.nodes > 1 and backend_name == XLA:
        raise ConfigError("backend.nodes", "the replicas of xla are on one machine: leave it out")


def started() -> bool:
    """It may be that a launcher has started this process; :mod:`joining` knows for sure."""
    return bool(_STARTED & os.environ.keys())


def _check_seconds(key: str, value: Any) -> None:
    seconds = convert(float, value, key)
    if not 0 < seconds < _LONGEST:
        raise ConfigError(key, f"{value} s is no time; give more than 0, and less than {_LONGEST}")


def wanted(backend: Mapping[str, Any]) -> Starting | None:
    """What this process has to start; None: it does the work itself, alone or as one of several.

    Raises:
        ConfigError: a key is wrong, or says another number than the launcher that started us.
    """
    from phaseloop.engine.backends import joining  # with it torch: not before the keys are right

    starting = asked_for(backend)
    joined = joining.found() if backend.get("name") != ALONE else joining.started_by_us()
    if joined is None:
        starting.check()
        return starting if starting.several else None
    if starting.processes not in (1, joined.local_world_size):
        raise ConfigError(
            "backend.processes",
            f"is {starting.processes}, and {joined.by} started {joined.local_world_size} on this "
            f"machine: let it start as many, or leave the key out",
        )
    if joining.started_by_us() is None:
        _check_others(backend, starting, joined.by, joining.machines(joined))
    return None


def _check_others(
    backend: Mapping[str, Any], starting: Starting, launcher: str, machines: int | None
) -> None:
    """Raises ConfigError for what another launcher would have to do, and does not hear of."""
    if starting.restarts:
        raise ConfigError(
            "backend.restarts",
            f"{launcher} started this process, and has to start it again, {_AGAIN[launcher]}: "
            f"leave the key out",
        )
    if backend.get("rendezvous") is not None:
        raise ConfigError(
            "backend.rendezvous",
            f"{launcher} started this process, and has said where all meet: leave the key out",
        )
    if starting.nodes != 1 and machines not in (None, starting.nodes):
        raise ConfigError(
            "backend.nodes",
            f"is {starting.nodes}, and {launcher} started processes on {machines}: let it start "
            f"them on as many, or leave the key out",
        )


def resolved(backend: Mapping[str, Any]) -> dict[str, Any]:
    """The section without the keys of who starts, and with the backend that ``auto`` means."""
    from phaseloop.engine.backends import joining

    rest = {key: value for key, value in backend.items() if key not in KEYS}
    if rest.get("name") == AUTO:
        rest["name"] = joining.usual()
    return rest
