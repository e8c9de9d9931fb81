"""Surroundings: the environment of a launcher's processes, and quiet around it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Mapping

from phaseloop.engine.backends.joining import PHASELOOP, STARTED_BY
from phaseloop.engine.starting import Starting

THREADS = "OMP_NUM_THREADS"

PARENT = "PHASELOOP_PARENT"
"""Process id of the launcher, with which its processes end."""


def variables(starting: Starting, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the processes, beside those that this one has."""
    chosen = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # what is said of lost connections is said by us
    if starting.processes > 1:  # else each takes every core
        chosen[THREADS] = str(max(1, cores() // starting.processes))
    return {
        **{name: value for name, value in chosen.items() if name not in os.environ},
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # the others are handed on
        STARTED_BY: PHASELOOP,
        PARENT: str(os.getpid()),
        **environment,
    }


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def environ(values: Mapping[str, str]) -> Iterator[None]:
    """Variables in the environment of this process, which is that of those it starts."""
    before = {name: os.environ.get(name) for name in values}
    quit_before = signal.getsignal(signal.SIGQUIT)
    os.environ.update(values)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, quit_before)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the agent's own words about what we say; LOGLEVEL=INFO shows them."""
    logger = logging.getLogger("torch.distributed.elastic")
    if "LOGLEVEL" in os.environ:
        yield
        return
    nothing, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(nothing)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(nothing)
        logger.propagate = propagate
