"""RES-l and RES-m: what is each process's own, what all have, and another number of processes."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Task, Trainer
from tests.rigs import equal, r1, ranks
from tests.rigs.probes import parameters, watch


def train_r1(folder: Path, **options: Any) -> None:
    r1.train(folder, equal.probe_of(folder), backend=ranks.ddp(), **options)


def probe_of(folder: Path, rank: int) -> Path:
    return r1.probe_of_rank(equal.probe_of(folder), rank)


def batches(folder: Path, size: int) -> list[list[int]]:
    """Sample ids of every update of the last process that made it, over all ranks."""
    found: dict[int, list[int]] = {}
    for rank in range(size):
        for update in r1.lives(probe_of(folder, rank))[-1]:
            found.setdefault(update["update"], []).extend(update["ids"])
    return [ids for _, ids in sorted(found.items())]


NOISY: dict[str, Any] = {"augment": True, "optimizer_name": "adam"}
KILLED = 17
"""The update of the second epoch after which all processes are killed."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with a checkpoint of the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("ranks") / "killed"
    ended = ranks.run(
        train_r1, folder, save={"every_updates": 1},
        hooks={"at": r1.At("on_step", KILLED)}, **NOISY,
    )  # fmt: skip
    assert [one.code for one in ended] == [-9, -9]
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, undisturbed."""
    folder = tmp_path_factory.mktemp("ranks") / "whole"
    ranks.results(train_r1, folder, **NOISY)
    return folder


def copied(killed: Path, to: Path, size: int = 2) -> Path:
    """A copy of the killed run, with what its probes wrote, in a folder of the same name."""
    folder = to / killed.name
    shutil.copytree(killed, folder)
    for rank in range(2):
        shutil.copy(probe_of(killed, rank), probe_of(folder, rank))
    return folder


def test_res_l_random_states_are_per_rank_and_both_go_on_exactly(
    killed: Path, whole: Path, tmp_path: Path
) -> None:
    folder = copied(killed, tmp_path)
    ranks.results(train_r1, folder, save={"every_updates": 1}, **NOISY)
    equal.assert_eq(whole, folder)
    draws = [[u["draws"] for u in r1.lines(probe_of(whole, rank), "update")] for rank in (0, 1)]
    assert all(a != b for a, b in zip(*draws, strict=True))


@pytest.mark.parametrize("size", [1, 3])
def test_res_l_another_number_goes_on_with_the_same_samples(
    killed: Path, whole: Path, tmp_path: Path, size: int
) -> None:
    folder = copied(killed, tmp_path)
    ended = ranks.run(
        train_r1, folder, **NOISY, save={"every_updates": 1},
        processes=size,
    )  # fmt: skip
    assert [one.code for one in ended] == [0] * size, ranks.outputs([x.output for x in ended])
    expected = [sorted(ids) for ids in batches(whole, 2)]
    assert [sorted(ids) for ids in batches(folder, size)] == expected[KILLED:]
    (said,) = [x for x in ended[0].output.splitlines() if "was made by" in x]
    assert f"made by 2 processes, this is {size}" in said and "last bits, may differ" in said


def restored(folder: Path) -> dict[str, Any]:
    """What every rank has right after it has resumed, and at the end."""
    task = r1.make_task(folder, **NOISY, backend=ranks.ddp())
    state = watch("on_start", lambda task: _optimizer_of(task))
    Trainer(task, {**r1.make_hooks(save={"every_updates": 1}), "state": state}).train()
    return {"resumed": state.seen[0], "end": _optimizer_of(task)}


def _optimizer_of(task: Task) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(task.optimizers["optimizer"].state_dict())
    return {**state, "parameters": parameters(task)}


def test_res_m_optimizers_agree_over_ranks_after_a_resume(killed: Path, tmp_path: Path) -> None:
    found = ranks.agreed(ranks.results(restored, copied(killed, tmp_path)))
    assert {float(x["step"]) for x in found["resumed"]["state"].values()} == {float(KILLED)}
    assert {float(x["step"]) for x in found["end"]["state"].values()} == {3.0 * r1.UPDATES}
