"""A function in N real processes that find each other, as a launcher would start them.

Each is a fork from the helper of :mod:`tests.rigs.process` and has the variables of a launcher:
torchrun's, and within :func:`horovod_instead` those of horovodrun, too.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import TCPStore

from phaseloop.engine.backends import Ddp, Horovod, rendezvous
from phaseloop.engine.backends.horovod_process import place_of
from phaseloop.engine.backends.joining import HOROVODRUN, Joining
from phaseloop.engine.backends.processes import Processes
from tests.rigs import cli, equal, process
from tests.rigs.process import Ended, Running

HOST = "127.0.0.1"

_OF_DDP = {"find_unused_parameters", "static_graph", "bucket_mb", "sync_batch_norm"}
_instead = [False]


@contextlib.contextmanager
def horovod_instead(on: bool = True) -> Iterator[None]:
    """Within it, processes that are started find one another by Horovod, and not by torch.

    Args:
        on: False: by torch all the same.
    """
    before, _instead[0] = _instead[0], on
    try:
        yield
    finally:
        _instead[0] = before


def run(
    function: Callable[..., Any],
    *args: Any,
    processes: int = 2,
    limit: float = process.LIMIT,
    variables: dict[str, str] | None = None,
    **options: Any,
) -> list[Ended]:
    """``function(*args, **options)`` in every one of ``processes``, to their ends; by rank.

    Args:
        function: one at the top of a module; it learns its rank from the environment.
        args, options: anything that pickle takes.
        processes: how many.
        limit: seconds that all of them have together.
        variables: further ones of the environment.

    Raises:
        AssertionError: one hangs; shows the stacks and the output of all.
    """
    with started(function, *args, processes=processes, variables=variables, **options) as all_:
        return wait(all_, limit)


def results(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """What ``function`` returned, by rank; every process has to end well. Options: see :func:`run`.

    Raises:
        AssertionError: one did not; shows the output of all.
    """
    ended = run(function, *args, **options)
    if any(one.code for one in ended):
        codes = ", ".join(str(one.code) for one in ended)
        raise AssertionError(f"ended with {codes}:\n{outputs([one.output for one in ended])}")
    return [one.value for one in ended]


@contextlib.contextmanager
def started(
    function: Callable[..., Any],
    *args: Any,
    processes: int = 2,
    variables: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[list[Running]]:
    """The processes while they run, by rank: to be sent signals, and to be waited for.

    What still runs when the block is left is killed.
    """
    with _launcher(processes) as found:
        shared, running = {**found, **(variables or {})}, list[Running]()
        try:
            for rank in range(processes):
                running.append(process.start(_as_rank, rank, shared, function, args, options))
            yield running
        finally:
            for one in running:
                if not one.done:
                    one.kill()


@contextlib.contextmanager
def programs(code: str, *words: str, processes: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """The same with interpreters of their own, which exit as every program does; forks do not.

    Args:
        code: what each runs.
        words: its ``sys.argv`` from 1 on.
    """
    with _launcher(processes) as shared:
        running: list[subprocess.Popen[str]] = []
        try:
            for rank in range(processes):
                variables = {**cli.environment(), **shared, **_of_rank(rank, shared)}
                command = [sys.executable, "-c", code, *words]
                running.append(
                    subprocess.Popen(
                        command, cwd=cli.ROOT, env=variables, stderr=subprocess.PIPE, text=True
                    )
                )
            yield running
        finally:
            for one in running:
                one.kill()
                one.communicate()


@contextlib.contextmanager
def _launcher(processes: int) -> Iterator[dict[str, str]]:
    """The variables that all processes of a launcher have, and what they name."""
    # The store is here, not in rank 0, as torchrun's is in its agent: it takes a port that is free
    # and holds it, so that no other test can take the port between its choice and its use.
    store = TCPStore(HOST, 0, None, True, datetime.timedelta(seconds=60), wait_for_workers=False)
    with contextlib.ExitStack() as stack:
        yield {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **_of_horovodrun(processes, stack),
        }
    del store


def wait(running: list[Running], limit: float = process.LIMIT) -> list[Ended]:
    """Wait for the ends of all, ``limit`` seconds for all together.

    Raises:
        AssertionError: one hangs; shows the stacks and the output of all, none of which is left.
    """
    until = time.monotonic() + limit
    ended = [one.ended(max(0.0, until - time.monotonic())) for one in running]
    hanging = [rank for rank, one in enumerate(ended) if one is None]
    if hanging:
        for rank in hanging:
            running[rank].dump()
        time.sleep(0.2)
        texts = [
            running[rank].kill() if one is None else f"(ended with {one.code})\n{one.output}"
            for rank, one in enumerate(ended)
        ]
        names = ", ".join(map(str, hanging))
        raise AssertionError(f"rank {names} hangs after {limit} s:\n{outputs(texts)}")
    return [one for one in ended if one is not None]


def outputs(texts: list[str]) -> str:
    """The outputs of all ranks, one after another."""
    return "\n".join(f"--- rank {rank}: {text}" for rank, text in enumerate(texts))


def agreed(values: list[Any]) -> Any:
    """What all ranks gave, which has to be the same to the bit."""
    for rank, value in enumerate(values[1:], 1):
        found = list(equal.differ(f"ranks 0 and {rank}", values[0], value))
        assert not found, found
    return values[0]


def free_port() -> int:
    """A port that nobody has, nor is given who asks for any: those are higher."""
    for port in random.SystemRandom().sample(range(15000, 30000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    raise AssertionError("no port is free")


# --- inside the processes ---


def ddp(**options: Any) -> Processes:
    """Backend ``ddp`` on the CPU; or ``horovod``, which needs no options of torch's wrapper."""
    if by_horovod():
        return Horovod("cpu", **without_ddps(options))
    return Ddp("cpu", **options)


def by_horovod() -> bool:
    """This process was started within :func:`horovod_instead`."""
    return "HOROVOD_RANK" in os.environ


def without_ddps(options: dict[str, Any]) -> dict[str, Any]:
    """Those that every backend of several processes has."""
    return {name: value for name, value in options.items() if name not in _OF_DDP}


def _of_horovodrun(processes: int, stack: contextlib.ExitStack) -> dict[str, str]:
    """What all processes have that horovodrun starts, with a server that goes with the stack."""
    if not _instead[0]:
        return {}
    # Processes look for one another's tensors every millisecond; a test has time for no such wait.
    start = stack.enter_context(rendezvous.server(processes))
    return {**start(), "HOROVOD_CYCLE_TIME": "0.1"}


def _as_rank(
    rank: int,
    shared: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    os.environ.update({**shared, **_of_rank(rank, shared)})
    return function(*args, **options)


def _of_rank(rank: int, shared: dict[str, str]) -> dict[str, str]:
    """The variables of one process, beside those that all have."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if rendezvous.PORT in shared:
        size = int(shared["WORLD_SIZE"])
        variables.update(place_of(Joining(rank, size, rank, size, HOROVODRUN)))
    return variables
