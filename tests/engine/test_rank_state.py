"""Rank state: each process's own, packed into a checkpoint and taken out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import Task
from phaseloop.engine import rng
from phaseloop.engine.backends import Single
from phaseloop.engine.checkpoint import contents, rank_state, store
from tests.rigs import r1


class OneOf(Single):
    """One process of several, the others of which are not there: what they sent is given."""

    def __init__(self, rank: int, sent: list[bytes]) -> None:
        super().__init__()
        self.rank, self.world_size = rank, len(sent)
        self.sent = sent

    def gather_object(self, value: Any) -> list[Any]:
        self.sent[self.rank] = value
        return self.sent if self.primary else [None] * self.world_size


def task_of(rank: int, sent: list[bytes]) -> Task:
    """Its generators, meters, rows and carry are those of no other."""
    task = r1.make_task(None, test=True)
    task.build()
    task.backend = OneOf(rank, sent)
    task.agreement = object()  # type: ignore[assignment]  # there are others
    task.seed_all()
    task.progress.epoch_open = True
    task.meters = task.meter_sets["train"]
    task.meters.loss.add(torch.tensor(float(rank)), 2)
    task.record("rank", rank)
    whole = torch.arange(1000.0)
    task.carry = {"state": whole[rank : rank + 1]}  # a part of a larger piece of memory
    return task


@pytest.fixture
def gathered() -> tuple[dict[str, Any], list[dict[str, Any]], list[bytes]]:
    """What the primary of three saves, and what each of them had."""
    sent = [b""] * 3
    own = []
    for rank in (2, 1, 0):
        task = task_of(rank, sent)
        state = rank_state.gathered(task)
        own.insert(0, {"rng": state["rng"][0], **{n: state[n] for n in ("meters", "recorder")}})
        assert ("others" in state) == (rank == 0)
    return state, own, sent


def test_each_finds_its_own(gathered: Any, tmp_path: Path) -> None:
    state, own, sent = gathered
    assert rank_state.count(state) == 3
    contents.check_plain(state)
    saved = store.Store(tmp_path).write("update_000000001-1", {"state.pt": state}, {})
    state = store.load(saved, "state.pt")
    for rank in range(3):
        found = rank_state.of_rank(state, rank)
        assert torch.equal(found["rng"]["host"]["torch"], own[rank]["rng"]["host"]["torch"])
        assert found["meters"]["train"]["loss"]["total"] == 2 * rank
        assert found["recorder"]["series"]["rank"][0].tolist() == [rank]
        assert found["carry"]["state"].tolist() == [rank]
    states = [rank_state.of_rank(state, rank)["rng"]["host"]["torch"] for rank in range(3)]
    assert not torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    assert all(len(packed) < 25_000 for packed in sent)  # not the memory that a part was cut from


def test_a_process_takes_its_own(gathered: Any) -> None:
    state, own, _ = gathered
    task = task_of(1, [b""] * 3)
    task.meters.reset()
    rng.seed_host(7)
    rank_state.take(task, state)
    contents.restore_random(task, state)
    assert task.meters.loss.state_dict()["total"] == 2
    assert torch.equal(rng.host_state()["torch"], own[1]["rng"]["host"]["torch"])


def test_the_primary_never_looks_into_the_others(
    gathered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand processes, unpacking all would hold everybody up for seconds at each save."""
    _, _, sent = gathered
    monkeypatch.setattr(torch, "load", None)
    state = rank_state.gathered(task_of(0, sent))
    others = state["others"]
    assert sum(isinstance(value, torch.Tensor) for value in others.values()) == 1
    assert sum(others["sizes"]) == len(others["bytes"])


def test_one_process_alone_has_no_others() -> None:
    task = r1.make_task(None)
    task.build()
    state = rank_state.gathered(task)
    assert "others" not in state
    assert rank_state.count(state) == 1
    assert rank_state.of_rank(state, 0)["loader"] == {}


def test_before_a_test_is_where_its_draws_are_forgotten_to(gathered: Any) -> None:
    task = task_of(1, [b""] * 3)
    before = {"host": rng.host_state(), "device": {}}
    task.random_before_test = before
    torch.rand(3)
    assert torch.equal(
        rank_state.gathered(task)["rng"][0]["host"]["torch"], before["host"]["torch"]
    )


def test_only_the_epoch_at_hand_has_meters_that_others_send(gathered: Any) -> None:
    """A test's may be as large as all its samples, and it is run again from its start."""
    state, own, _ = gathered
    assert own[1]["meters"].keys() > {"train"} and state["meters"].keys() > {"train"}
    assert rank_state.of_rank(state, 1)["meters"].keys() == {"train"}
    sent = [b""] * 2
    for rank in (1, 0):
        task = task_of(rank, sent)
        task.progress.epoch_open = False
        state = rank_state.gathered(task)
    assert rank_state.of_rank(state, 1)["meters"] == {}
    task = task_of(1, [b""] * 2)
    rank_state.take(task, state)
    # Left as it is: an epoch begins with meters that were reset.
    assert task.meters.loss.state_dict()["total"] == 2
