"""The rig for several processes: they find each other; one that hangs or fails is shown."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.rigs import process, ranks


def _sum(value: float) -> tuple[float, int, int, int]:
    dist.init_process_group("gloo")
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    found = (float(total), dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()
    return found


def _fail_on_1() -> None:
    print("I am here", flush=True)
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 says no")


def _hang_on_1() -> int:
    if os.environ["RANK"] == "1":
        _hang_here()
    return os.getpid()


def _hang_here() -> None:
    time.sleep(60)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_find_each_other_and_give_values_by_rank(processes: int) -> None:
    # Each adds 10 + its rank.
    total = sum(10.0 + rank for rank in range(processes))
    expected = [(total, rank, processes, rank) for rank in range(processes)]
    assert ranks.results(_sum, 10.0, processes=processes) == expected


def test_two_groups_at_once_do_not_meet() -> None:
    with ranks.started(_sum, 1.0) as first, ranks.started(_sum, 2.0) as second:
        assert [one.value[0] for one in ranks.wait(second)] == [5.0, 5.0]
        assert [one.value[0] for one in ranks.wait(first)] == [3.0, 3.0]


def test_a_rank_that_fails_shows_all_outputs() -> None:
    assert [one.code for one in ranks.run(_fail_on_1)] == [0, 1]
    with pytest.raises(AssertionError, match="rank 1 says no") as failed:
        ranks.results(_fail_on_1)
    assert str(failed.value).count("I am here") == 2


def test_a_rank_that_hangs_is_shown_where_it_does_and_is_killed() -> None:
    with ranks.started(_hang_on_1) as running:
        with pytest.raises(AssertionError, match="rank 1 hangs after 1 s") as failed:
            ranks.wait(running, limit=1)
        assert "_hang_here" in str(failed.value)
        assert not process.alive(running[1].pid)
