"""What replicas that are threads wait at: for whom, how long, and of what they fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phaseloop.engine.backends.xla.lockstep import Lockstep
from phaseloop.engine.backends.xla.replicas import Xla
from phaseloop.engine.backends.xla.threads import Threads
from phaseloop.engine.errors import PeerError

LIMIT, WORK = 0.2, 0.6
"""Seconds: a wait's limit, and work that takes longer."""


def two(function: Callable[[int], Any]) -> list[Any]:
    """What a function of the rank gave in two threads; or its error."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = function(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found.get(rank) for rank in (0, 1)]


def test_the_first_works_first_and_the_time_it_takes_is_no_waiting() -> None:
    lockstep, order = Lockstep(2, longest=10.0), []

    def step(rank: int) -> None:
        def work() -> None:
            time.sleep(WORK)
            order.append(rank)

        for _ in range(2):
            lockstep.run(rank == 0, work, LIMIT)

    assert two(step) == [None, None]
    assert order[0] == 0 and sorted(order) == [0, 0, 1, 1]


@pytest.mark.parametrize(("longest", "late"), [(10.0, False), (LIMIT, True)])
def test_nor_does_who_waits_for_a_value_count_it(longest: float, late: bool) -> None:
    lockstep = Lockstep(2, longest)

    def step(rank: int) -> float:
        host = Threads(lockstep, rank, 2, LIMIT)
        lockstep.run(rank == 0, lambda: time.sleep(WORK * rank), LIMIT)
        tensor = torch.tensor([2.0 + rank])
        host.sum(tensor).wait()
        return float(tensor)

    first, second = two(step)
    if late:
        assert isinstance(first, RuntimeError) and "timed out after 0.2 s" in str(first)
    else:
        assert first == second == 5.0


def test_one_that_does_not_come_is_waited_for_until_the_limit() -> None:
    lockstep = Lockstep(2, longest=10.0)
    began = time.monotonic()
    first, _ = two(lambda rank: None if rank else lockstep.run(True, lambda: None, LIMIT))
    assert isinstance(first, RuntimeError) and "timed out" in str(first)
    assert LIMIT <= time.monotonic() - began < 5.0


def test_whoever_waits_fails_of_the_first_cause() -> None:
    lockstep, cause = Lockstep(2, longest=10.0), ValueError("planted")

    def step(rank: int) -> None:
        if rank:
            lockstep.abort(1, PeerError("of another"))
            lockstep.abort(1, cause)
            lockstep.abort(1, ValueError("a later one"))
        else:
            Threads(lockstep, 0, 2, 10.0).barrier()

    first, _ = two(step)
    assert isinstance(first, PeerError) and str(first) == "rank 1: ValueError: planted"
    assert first.__cause__ is cause
    with pytest.raises(PeerError, match="rank 1: ValueError: planted"):
        lockstep.run(True, lambda: None, LIMIT)


@pytest.mark.parametrize("given", [None, "10.0.0.2"])
def test_processes_of_a_script_meet_where_xla_says(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back after
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("MASTER_ADDR", given)
    xla = Xla.__new__(Xla)
    xla._threads = False
    xla.package = SimpleNamespace(runtime=SimpleNamespace(get_master_ip=lambda: "10.0.0.1"))
    if given is None:
        assert xla._where() == "at an address that XLA finds"
    xla._know_where()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == (given or "10.0.0.1", "12355")
    assert xla._where() == f"at {given or '10.0.0.1'}:12355"
