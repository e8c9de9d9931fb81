"""A function in N real processes that find each other, as a launcher would start them.

Each is a fork from the helper of :mod:`tests.rigs.process` and has the variables of a launcher.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed import TCPStore

from phaseloop.engine.backends import Ddp
from tests.rigs import equal, process
from tests.rigs.process import Ended, Running

HOST = "127.0.0.1"


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
    # The store is here, not in rank 0, as torchrun's is in its agent: it takes a port that is free
    # and holds it, so that no other test can take the port between its choice and its use.
    store = TCPStore(HOST, 0, None, True, datetime.timedelta(seconds=60), wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(variables or {}),
    }
    running = [
        process.start(_as_rank, rank, shared, function, args, options) for rank in range(processes)
    ]
    try:
        yield running
    finally:
        for one in running:
            if not one.done:
                one.kill()
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


# --- inside the processes ---


def ddp(**options: Any) -> Ddp:
    """Backend ``ddp`` on the CPU."""
    return Ddp("cpu", **options)


def _as_rank(
    rank: int,
    shared: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    return function(*args, **options)
