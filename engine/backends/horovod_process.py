"""Horovod in this process: initialized once, whatever is trained here, and left at the end."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from phaseloop.engine.backends import joining
from phaseloop.engine.backends.sockets import Sockets, open_here
from phaseloop.engine.errors import ConfigError, PhaseloopError

log = logging.getLogger("phaseloop")

_FUSION = "HOROVOD_FUSION_THRESHOLD"
_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_ITS_SECONDS = 30
"""Horovod's own limit; a shorter one may be over before all have found one another."""

_LEAST = (0, 28)
_GET_IT = (
    "`make env-horovod` builds it in an environment of its own; elsewhere install the extra "
    "phaseloop[horovod] with the flags that docs/horovod.md lists"
)


def package() -> Any:
    """``horovod.torch``.

    Raises:
        ConfigError: it is not installed, has no part for torch, or cannot be used.
    """
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        raise ConfigError("backend.name", f"horovod is not installed: {_GET_IT}") from None
    if tuple(int(part) for part in version.split(".")[:2]) < _LEAST:
        least = ".".join(map(str, _LEAST))
        raise ConfigError("backend.name", f"horovod {version} is older than {least}: {_GET_IT}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import horovod.torch
    except ImportError as error:
        text = f"horovod {version} cannot be imported ({error}): {_GET_IT}"
        raise ConfigError("backend.name", text) from None
    if not hasattr(horovod.torch, "init"):  # built where torch was not: it only warns
        text = f"horovod {version} was installed without its part for torch: {_GET_IT}"
        raise ConfigError("backend.name", text)
    return horovod.torch


@dataclass
class _Begun:
    """What Horovod was initialized with.

    Attributes:
        fusion: bytes that gradients are put together in; empty: as many as Horovod likes.
        seconds: that a process may be silent which is stopped.
        connections: with the others.
    """

    fusion: str
    seconds: int
    connections: Sockets = field(default_factory=set)


_begun: list[_Begun] = []


def begin(hvd: Any, fusion_mb: float | None, processes: int, timeout: float) -> None:
    """Initialize Horovod, where that is not done.

    Args:
        hvd: ``horovod.torch``.
        fusion_mb: megabytes that gradients are put together in; None: see :func:`_fusion`.
        processes: how many there are.
        timeout: seconds that a process may be silent.

    Raises:
        ConfigError: it is initialized, and puts gradients together in other messages.
        PhaseloopError: it cannot find the others.
    """
    fusion = _fusion(fusion_mb, processes)
    seconds = max(_ITS_SECONDS, math.ceil(timeout))
    if hvd.is_initialized():
        if not _begun:  # by somebody else
            has = os.environ.get(_FUSION, ""), int(os.environ.get(_SECONDS, _ITS_SECONDS))
            _begun.append(_Begun(*has))
        _check(_begun[0], fusion, seconds)
        return
    begun = _Begun(fusion, seconds)
    before = open_here()
    with _environ({_SECONDS: str(seconds), **({_FUSION: fusion} if fusion else {})}):
        try:
            hvd.init()
        except ValueError as error:
            raise PhaseloopError(f"{error} (HOROVOD_LOG_LEVEL=info shows more)") from None
    begun.connections = open_here() - before
    _begun.append(begun)


def _check(begun: _Begun, fusion: str, seconds: int) -> None:
    if begun.fusion != fusion:
        has, wanted = (f"{n} bytes" if n else "its own choice" for n in (begun.fusion, fusion))
        raise ConfigError(
            "backend.fusion_mb",
            f"Horovod was initialized in this process with {has}, and this training would have "
            f"{wanted}: give all in one process the same",
        )
    if begun.seconds < seconds:
        log.warning(
            "Horovod was initialized in this process with a time limit of %d s, and keeps it: a "
            "process that is stopped for longer ends the others, whatever backend.timeout says",
            begun.seconds,
        )


def connections() -> Sockets:
    """Horovod's with the others."""
    return _begun[0].connections if _begun else set()


def _fusion(megabytes: float | None, processes: int) -> str:
    """Bytes that gradients are put together in; empty: as many as Horovod likes."""
    if megabytes is not None:
        return str(int(megabytes * 2**20))
    return os.environ.get(_FUSION, "" if processes == 2 else "0")


@contextlib.contextmanager
def _environ(values: dict[str, str]) -> Iterator[None]:
    """Variables while Horovod reads them: what is there after it is the user's, as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def place_of(joined: joining.Joining) -> dict[str, str]:
    """One of the processes that our launcher started, in the variables that horovodrun sets."""
    names = {"RANK": joined.rank, "SIZE": joined.world_size, "LOCAL_RANK": joined.local_rank,
             "LOCAL_SIZE": joined.local_world_size, "CROSS_RANK": 0, "CROSS_SIZE": 1}  # fmt: skip
    return {f"HOROVOD_{name}": str(value) for name, value in names.items()}
