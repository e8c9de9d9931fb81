"""Policy ``roll_back`` of the hook ``non_finite``: back to the checkpoint, on in another order."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import (
    Batch,
    ConfigError,
    Hook,
    LossScale,
    NonFiniteError,
    Order,
    PhaseloopError,
    Precision,
    Task,
    Trainer,
)
from phaseloop.engine.checkpoint import store
from phaseloop.engine.data.order import epoch_order
from phaseloop.hooks.console import Console
from phaseloop.hooks.freeze import Freeze
from phaseloop.hooks.non_finite import NonFinite
from phaseloop.train_steps import Alternating
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, probe_of, rows
from tests.rigs.probes import SlowWrites
from tests.rigs.r1 import At

BAD = 7
"""The sample that makes a NaN where it comes together with sample 11."""


class Touchy(nn.Module):
    """Cross-entropy that is NaN where two samples meet in a batch, as the order of epoch 2 has it.

    It knows samples by their first input.
    """

    def __init__(self, pair: tuple[int, int]) -> None:
        super().__init__()
        self.marks = [float(r1.Samples().x[i, 0]) for i in pair]

    def meets(self, x: Tensor) -> bool:
        first = x[:, 0].tolist()
        return all(mark in first for mark in self.marks)


class Network(nn.Sequential):
    """R1's network, whose output is NaN where the two samples meet."""

    def __init__(self, pair: tuple[int, int]) -> None:
        super().__init__(*r1.network())
        self.touchy = [Touchy(pair)]  # in a list: no part of the model

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output * math.nan if self.training and self.touchy[0].meets(x) else output


def pair_of(update: int) -> tuple[int, int]:
    """Two samples that meet in this update of an undisturbed run, and not in the epoch before."""
    ids = _ids()
    now = ids[update - 1]
    before = [set(batch) for batch in ids[: update - 1]]
    for a in now:
        for b in now:
            if a < b and not any({a, b} <= batch for batch in before):
                return a, b
    raise AssertionError("no such pair")


_orders: list[list[list[int]]] = []


def _ids() -> list[list[int]]:
    """The samples of each update of an undisturbed run."""
    if not _orders:
        probe = process.scratch() / "roll_back.probe"
        process.result(r1.train, process.scratch() / "roll_back", probe)
        _orders.append([line["ids"] for line in r1.lines(probe, "update")])
    return _orders[0]


def train(folder: Path, pair: tuple[int, int], at: Any = None, **options: Any) -> dict[str, Any]:
    """R1, three epochs, which goes wrong where the two samples meet."""
    hooks = {"non_finite": NonFinite("roll_back", **options.pop("policy", {}))}
    hooks.update(options.pop("hooks", {}))
    if at is not None:
        hooks["at"] = at
    save = {"every_updates": 4, **options.pop("save", {})}
    return r1.train(
        folder, probe_of(folder), hooks=hooks, save=save, model=Network(pair), **options
    )


def events(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder) if row.get("event") == "roll_back"]


def test_it_goes_back_to_the_checkpoint_and_on_in_another_order(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pair = pair_of(17)
    outcome = process.result(train, folder, pair_of(17))
    assert (outcome["status"], outcome["updates"]) == ("finished", 30)

    lines = r1.lines(probe_of(folder), "update")
    numbers = [line["update"] for line in lines]
    # Update 17 was left out; checkpoint 16 is the newest, and 17 comes from another order.
    assert numbers[:17] == [*range(1, 17), 16]
    assert lines[16]["counted"] is False
    again = lines[17]
    assert again["update"] == 17
    assert again["ids"] != _ids()[16]
    # The seventh batch of epoch 2 (positions 24 to 27), in the order after one roll-back.
    order = epoch_order(40, shuffle=True, seed=0, epoch=2, roll_backs=1)
    assert again["ids"] == order.slice(24, 28).tolist()
    # The generators went back too: dropout, and then the probe, draw what they drew.
    assert again["draws"] == lines[16]["draws"]
    (event,) = [e for e in events(folder) if e["number"] == 1]
    assert (event["update"], event["to"]) == (17, 16)
    assert all(str(i) in event["reason"] for i in pair)
    assert "3.bias" in event["reason"]
    # From there on each update is one in metrics.jsonl, in order, and the skip is not there.
    logged = [row["update"] for row in rows(folder) if "loss" in row]
    assert logged == list(range(1, 31))
    assert not [row for row in rows(folder) if row.get("event") == "skip"]


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """With the fault at update 17 the run after it starts from update 16's weights and momentum."""
    seen: list[Any] = []

    class Note(Hook):
        def on_step(self, task: Task) -> None:
            if task.progress.updates == 16:
                state = {n: p.detach().clone() for n, p in task.bare_model.named_parameters()}
                seen.append((task.progress.roll_backs, state))

        def on_resume(self, task: Task) -> None:
            self.on_step(task)

    train(tmp_path / "run", pair_of(17), hooks={"note": Note()})
    assert [count for count, _ in seen][:2] == [0, 0]  # after update 16, and after the one left out
    first = seen[0][1]
    back = next(state for count, state in seen if count == 1)
    assert all(torch.equal(first[name], back[name]) for name in first)


# Before the fault; in the update after the roll-back; much later, from a checkpoint after it.
@pytest.mark.parametrize("calls", [At("on_step", 16), At("on_resume", 16), At("on_step", 27)])
def test_a_run_that_rolled_back_is_resumed(tmp_path: Path, calls: At) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    process.result(train, whole, pair_of(17))
    killed = process.run(train, folder, pair_of(17), at=calls)
    assert killed.code == -signal.SIGKILL, killed.output
    process.result(train, folder, pair_of(17))
    assert_eq(whole, folder)


def test_without_a_checkpoint_it_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="no checkpoint to roll back to"):
        train(tmp_path / "run", pair_of(3))


def always_nan(task: Task) -> None:
    """A step whose loss is NaN from update 11 on, whatever the samples."""
    batch = task.next_batch()
    loss = task.criterion(task.forward(batch.input), batch.target)
    if task.train:
        task.backward(loss * math.nan if task.progress.updates >= 10 else loss)
        task.update()


def test_so_often_and_no_oftener(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(NonFiniteError, match="the run has rolled back 3 times already"):
        train(folder, pair_of(17), policy={"most_roll_backs": 3}, train_step=always_nan)
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    assert [event["number"] for event in events(folder)] == [3]  # the file goes back, too


class Late(Hook):
    """A hook that has a state only after update 18."""

    def __init__(self) -> None:
        self.count = 0

    def on_step(self, task: Task) -> None:
        self.count = task.progress.updates

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.count > 16 else {}


def test_a_hook_that_cannot_go_back_is_named(tmp_path: Path) -> None:
    with pytest.raises(PhaseloopError, match="late has a state now and had none"):
        train(tmp_path / "run", pair_of(18), hooks={"late": Late()})


def test_what_only_watches_and_came_with_the_resume_is_no_hindrance(tmp_path: Path) -> None:
    """The checkpoint to go back to has no state of it: it goes on with what it has."""
    folder, pair = tmp_path / "run", pair_of(17)
    train(folder, pair, at=At("on_step", 16, "stop"))
    train(folder, pair, hooks={"console": Console()})
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["updates"]) == ("finished", 30)
    assert [event["to"] for event in events(folder)] == [16]


def test_an_overflow_of_scaled_gradients_is_no_reason(tmp_path: Path) -> None:
    options = {"precision": Precision("float16", LossScale(initial=2.0**127))}
    task = r1.make_task(tmp_path / "run", epochs=1, **options)
    Trainer(task, r1.make_hooks(non_finite=NonFinite("roll_back"))).train()
    assert task.progress.roll_backs == 0
    assert task.progress.skipped > 0


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="most_roll_backs: 0 is less than 1"):
        NonFinite("roll_back", most_roll_backs=0)


def test_back_into_the_epoch_before(tmp_path: Path) -> None:
    """Update 13 goes wrong, checkpoint 8 is the newest: epoch 1 ends again, and once."""
    folder = tmp_path / "run"
    save = {"every_epochs": None, "every_updates": 8}
    assert process.result(train, folder, pair_of(13), save=save)["updates"] == 30
    ends = [line["update"] for line in r1.lines(probe_of(folder), "phase_end")]
    assert ends == [10, 10, 20, 30]  # before the roll-back, and then once for each epoch
    (event,) = events(folder)
    assert (event["update"], event["to"]) == (13, 8)


def test_an_epoch_that_is_gone_back_in_has_one_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process.result(train, folder, pair_of(17), test=True)
    ends = r1.lines(probe_of(folder), "phase_end")
    assert [(line["phase"], line["update"]) for line in ends] == [
        (name, update) for update in (10, 20, 30) for name in ("train", "test")
    ]


@pytest.mark.parametrize("lengths", [{"first_updates": 14}, {"after_updates": 14}], ids=str)
def test_what_is_frozen_goes_back_too(tmp_path: Path, lengths: dict[str, int]) -> None:
    """Update 17 goes wrong and the run goes back to 12: updates 13 and 14 are as they were."""
    moved: list[tuple[int, int, bool]] = []

    class Note(Hook):
        order = Order.FREEZE + 1

        def on_gradients(self, task: Task) -> None:
            frozen = task.bare_model[0].weight.grad is None
            moved.append((task.progress.roll_backs, task.progress.updates + 1, frozen))

    hooks = {"freeze": Freeze(["0.*"], **lengths), "note": Note()}
    save = {"every_epochs": None, "every_updates": 12}
    train(tmp_path / "run", pair_of(17), hooks=hooks, save=save)
    assert {count for count, _, _ in moved} == {0, 1}
    for _, update, frozen in moved:
        assert frozen is ((update <= 14) if "first_updates" in lengths else (update > 14)), update


class NanFirst(Alternating):
    """The first optimizer's loss is NaN at update 6, once; the other's never is."""

    def _loss(self, task: Task, name: str, batch: Batch) -> Tensor:
        loss = super()._loss(task, name, batch)
        bad = name == "first" and task.progress.updates == 5 and not task.progress.roll_backs
        return loss * math.nan if bad else loss


class Twice:
    """The same loss for both layers."""

    def first(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(batch.input), batch.target)

    last = first


def test_what_moved_in_a_window_that_goes_back_is_not_saved(tmp_path: Path) -> None:
    """The other optimizer has moved when the first's loss is NaN: no checkpoint 6 comes of it."""
    folder = tmp_path / "run"
    model = r1.network()
    optimizers = {
        "first": torch.optim.SGD(model[0].parameters(), lr=0.1),
        "last": torch.optim.SGD(model[3].parameters(), lr=0.1),
    }
    hooks = {"non_finite": NonFinite("roll_back")}
    r1.train(
        folder, hooks=hooks, save={"every_updates": 2}, model=model, optimizer=optimizers,
        train_step=NanFirst(), criterion=Twice(), train_meters={}, epochs=1,
    )  # fmt: skip
    (event,) = events(folder)
    assert (event["update"], event["to"]) == (6, 4)


def test_a_nan_loss_is_a_fault_with_scaled_gradients_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    half = Precision("float16", LossScale(initial=8))
    outcome = train(folder, pair_of(17), precision=half)
    assert outcome["updates"] == 30
    assert [event["number"] for event in events(folder)] == [1]


def test_a_save_in_flight_is_waited_for(tmp_path: Path) -> None:
    """The newest checkpoint is that of update 16, also where it is still being written."""
    folder, slow = tmp_path / "run", SlowWrites(0.2)
    outcome = process.result(train, folder, pair_of(17), hooks={"slow": slow})
    assert (outcome["status"], outcome["updates"]) == ("finished", 30)
    (event,) = events(folder)
    assert event["to"] == 16
    numbers = [line["update"] for line in r1.lines(probe_of(folder), "update")]
    assert numbers[:18] == [*range(1, 17), 16, 17]
    saves = [row for row in raw_rows(folder) if row.get("event") == "save"]
    names = [row["checkpoint"] for row in saves]
    assert len(names) == len(set(names))
    left = store.Store(folder / "checkpoints").names()
    assert [store.position(name)[0] for name in left] == [30]


def raw_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
