"""RES: resume. An interrupted run goes on in a new process as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Hook, Order, Phases, Run, Task, TensorData, Trainer
from phaseloop.engine import rng
from phaseloop.engine.backends import Single
from phaseloop.engine.checkpoint import contents, store
from phaseloop.engine.data.source import Data
from phaseloop.hooks.average import Average
from phaseloop.hooks.early_stop import EarlyStop
from phaseloop.hooks.freeze import Freeze
from phaseloop.hooks.precise_bn import PreciseBN
from tests.rigs import equal, process, r1
from tests.rigs.equal import assert_eq, newest, probe_of, reference, undisturbed
from tests.rigs.r1 import At

KILLED = -signal.SIGKILL
TESTED: dict[str, Any] = {"test": True, "save": {"keep_best": 1, "metric": "test/loss"}}


def go(folder: Path, at: At | None = None, **options: Any) -> process.Ended:
    """One process of the run in ``folder``, broken off by ``at``, or to its end."""
    hooks = {**options.pop("hooks", {}), **({} if at is None else {"at": at})}
    return process.run(r1.train, folder, probe_of(folder), hooks=hooks, **options)


def finish(folder: Path, **options: Any) -> dict[str, Any]:
    """The last process of the run; how it ended."""
    ended = go(folder, **options)
    assert ended.code == 0, ended.output
    assert ended.value["status"] == "finished", ended.value
    return dict(ended.value)


def updates(life: list[dict[str, Any]]) -> list[int]:
    """Numbers of the updates that a process made."""
    return [line["update"] for line in life]


def ids_of_epoch(folder: Path, epoch: int) -> list[int]:
    """The samples of an epoch in the order they were used, over all processes."""
    lines = [x for x in r1.lines(probe_of(folder), "update") if x["epoch"] == epoch]
    return [index for line in lines for index in line["ids"]]


BREAKS = {
    "kill": (lambda k: At("on_step", k), KILLED, {"save": {"every_updates": 17}}),
    "terminate": (lambda k: At("on_step", k, signal.SIGTERM), 0, {}),
    "request": (lambda k: At("on_step", k, "stop"), 0, {}),
}


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("kill", {}),
        ("kill", {"optimizer_name": "adam"}),
        ("terminate", {"augment": True}),
        ("request", {"augment": True, "optimizer_name": "adam"}),
        ("kill", {"workers": 2}),
        ("terminate", {"workers": 2, "augment": True}),
    ],
    ids=str,
)
def test_res_a_every_sample_of_the_interrupted_epoch_once(
    tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    check_res_a(tmp_path / "run", way, options)


def check_res_a(folder: Path, way: str, options: dict[str, Any]) -> None:
    """Broken off in epoch 2 after update 7 of 10, and gone on with in a new process."""
    make_at, code, more = BREAKS[way]
    options = {**options, **more}
    assert go(folder, make_at(17), **options).code == code
    finish(folder, **options)

    first, second = r1.lives(probe_of(folder))
    assert updates(first) == list(range(1, 18))
    assert updates(second) == list(range(18, 31))
    ids = ids_of_epoch(folder, 2)
    assert sorted(ids) == list(range(40))
    assert ids == ids_of_epoch(undisturbed(**options), 2)
    assert_eq(undisturbed(**options), folder)


def test_res_a_inside_a_window_of_several_micro_batches(tmp_path: Path) -> None:
    """A signal in an open window waits for its update."""
    options = {"data": {"micro_batch_size": 1}, "run": {"log_every": 4}, "augment": True}
    folder = tmp_path / "run"
    at = At("on_backward", 16, signal.SIGTERM)  # in the first micro-batch of update 17
    assert go(folder, at, **options).value["updates"] == 17
    finish(folder, **options)
    assert_eq(undisturbed(**options), folder)


class Temperature(nn.Module):
    """A criterion with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output * self.scale, target)


class Together:
    """Makes one optimizer of the model's and the criterion's parameters."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion = criterion

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [*self.criterion.parameters(), *model.parameters()]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def by_layer(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """An optimizer for each linear layer, the second listed first."""
    return {
        "last": torch.optim.Adam(model[3].parameters(), lr=0.01),  # type: ignore[index]
        "first": torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),  # type: ignore[index]
    }


def drop_some(samples: list[dict[str, Any]]) -> Any:
    """A collate function that gives nothing for some micro-batches."""
    if sum(sample["index"] for sample in samples) % 5 == 0:
        return None
    return torch.utils.data.default_collate(samples)


class FreezeSome(Hook):
    """From epoch 2 on the batch norm and the first layer are left as they are."""

    def on_phase_start(self, task: Task) -> None:
        if task.train and task.phase.epoch == 2:
            task.bare_model[1].eval()
            task.bare_model[0].requires_grad_(False)


def with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))


TEMPERATURE = Temperature()

STATEFUL: dict[str, dict[str, Any]] = {
    "criterion": {"criterion": TEMPERATURE, "optimizer": Together(TEMPERATURE)},
    "two optimizers": {"optimizer": by_layer},
    "bfloat16": {"precision": "bfloat16"},
    "short tail": {"train": Data(r1.Samples(43, augment=True), 4, micro_batch_size=3)},
    "skipped windows": {"hooks": {"skip": r1.SkipSome()}},
    "empty micro-batches": {"data": {"micro_batch_size": 1, "collate": drop_some}},
    "frozen": {"model": with_batch_norm(), "hooks": {"freeze": FreezeSome()}},
    "frozen for good": {
        "model": with_batch_norm(),
        "freeze": ["1"],
        "hooks": {"freeze": Freeze(["0"], first_updates=17)},
    },
    "frozen later": {
        "model": with_batch_norm(),
        "optimizer_name": "adam",
        "hooks": {"freeze": Freeze(["0", "1"], after_epochs=1)},
    },
    "precise batch norm": {
        "model": with_batch_norm(),
        "augment": True,
        "hooks": {"average": Average(decay=0.9), "bn": PreciseBN(3)},
        "test": ("first", "second"),
    },
    "two test sets": {"test": ("first", "second")},
}


@pytest.mark.parametrize("kind", STATEFUL)
def test_res_a_whatever_has_state(tmp_path: Path, kind: str) -> None:
    """Stopped in a train phase, or killed in a test."""
    options: dict[str, Any] = {"test": True, "epochs": 2, **STATEFUL[kind]}
    watch = options.pop("hooks", {})
    whole = undisturbed(hooks=watch, **options)
    folder = tmp_path / "run"
    at = At("on_step", r1.lines(probe_of(whole), "update")[-4]["update"], signal.SIGTERM)
    if options["test"] is not True:
        at = At("on_step", r1.UPDATES, phase="second", position=1)
    assert go(folder, at, hooks=watch, **options).code in (0, KILLED)
    finish(folder, hooks=watch, **options)
    first, second = r1.lives(probe_of(folder))
    assert first and second
    assert_eq(whole, folder)


def test_res_b_the_order_belongs_to_the_epoch(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 4}
    folder = tmp_path / "run"
    go(folder, At("on_step", 14, signal.SIGTERM), **options)
    finish(folder, **options)

    whole = reference(**options)
    orders = [ids_of_epoch(folder, epoch) for epoch in (1, 2, 3, 4)]
    assert orders == [ids_of_epoch(whole, epoch) for epoch in (1, 2, 3, 4)]
    assert orders[2] != orders[1]
    drawn = [line["draws"] for line in r1.lines(probe_of(folder), "update")]
    assert drawn == [line["draws"] for line in r1.lines(probe_of(whole), "update")]
    assert len({draw for line in drawn for draw in line}) == 3 * 40
    assert_eq(whole, folder)


# Our workers are always kept from one epoch to the next.
@pytest.mark.parametrize(("workers", "phases"), [(0, {}), (2, {"test_every_updates": 5})], ids=str)
def test_res_c_only_the_interrupted_epoch_is_shortened(
    tmp_path: Path, workers: int, phases: dict[str, Any]
) -> None:
    options = {"epochs": 4, "workers": workers, "test": True, "phases": phases}
    folder = tmp_path / "run"
    go(folder, At("on_step", 14, signal.SIGTERM), **options)
    finish(folder, **options)

    _, second = r1.lives(probe_of(folder))
    for epoch in (3, 4):
        made = [line for line in second if line["epoch"] == epoch]
        assert len(made) == 10
        assert sorted(index for line in made for index in line["ids"]) == list(range(40))
    assert_eq(undisturbed(**options), folder)


BEFORE = Order.LOG  # before the checkpoint hook at the same event
ENDS = {
    "before": At("on_step", 10),
    "during": At("on_phase_end", 10, order=BEFORE),
    "after": At("on_phase_end", 10),
    "next-start": At("on_phase_start", 10),
}


@pytest.mark.parametrize(
    ("end", "test"), [*((end, True) for end in ENDS), ("before", False), ("next-start", False)]
)
def test_res_d_an_epochs_very_end(tmp_path: Path, end: str, test: bool) -> None:
    every = {"every_updates": 10, "every_epochs": None if test else 1}
    options = {"test": test, "save": every}
    folder = tmp_path / "run"
    assert go(folder, ENDS[end], **options).code == KILLED
    assert newest(folder).manifest["updates"] == 10
    finish(folder, **options)

    first, second = r1.lives(probe_of(folder))
    assert updates(first) == list(range(1, 11))
    assert updates(second) == list(range(11, 31))
    assert_eq(undisturbed(**options), folder)


@pytest.mark.parametrize("last", [14, 15])
def test_res_d_a_length_in_updates_that_ends_in_an_epoch(tmp_path: Path, last: int) -> None:
    options = {"epochs": None, "phases": {"updates": 15}, "test": True,
               "save": {"every_updates": 1}}  # fmt: skip
    folder = tmp_path / "run"
    assert go(folder, At("on_step", last), **options).code == KILLED
    finish(folder, **options)
    assert [updates(life) for life in r1.lives(probe_of(folder))] == [
        list(range(1, last + 1)), list(range(last + 1, 16)),
    ]  # fmt: skip
    assert_eq(undisturbed(**options), folder)


IN_A_TEST = {
    "start": At("on_phase_start", 20, phase="test"),
    "middle": At("on_step", 20, phase="test", position=1),
    "end": At("on_phase_end", 20, phase="test", order=BEFORE),
    "saved": At("on_phase_end", 20, phase="test"),
    "signal": At("on_forward", 20, signal.SIGTERM, phase="test"),
    "signal-at-end": At("on_phase_end", 20, signal.SIGTERM, phase="test", order=BEFORE),
}


@pytest.mark.parametrize("place", IN_A_TEST)
def test_res_e_a_test_is_run_again_from_its_start(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "run"
    watch = {"early_stop": EarlyStop("test/loss", patience=5), "counter": r1.Counter()}
    assert go(folder, IN_A_TEST[place], hooks=watch, **TESTED).code in (KILLED, 0)
    finish(folder, hooks=watch, **TESTED)

    first, second = r1.lives(probe_of(folder))
    assert updates(first) == list(range(1, 21))
    assert updates(second) == list(range(21, 31))  # no training is repeated
    again = [x for x in r1.lives(probe_of(folder), "phase_end")[1] if x["phase"] == "test"]
    there_already = place in ("saved", "signal-at-end")
    assert [x["update"] for x in again] == ([30] if there_already else [20, 30])
    assert all(x["ids"] == list(range(r1.TEST_SAMPLES)) for x in again)
    counts = equal.state_of(newest(folder))["hooks"]["counter"]["counts"]
    assert counts == {
        "train starts": 3, "train steps": 30, "train ends": 3,
        "test starts": 3, "test steps": 3 * 2, "test ends": 3,
    }  # fmt: skip
    assert_eq(undisturbed(hooks=watch, **TESTED), folder)


@pytest.mark.parametrize(
    ("at", "save"),
    [
        # Saved before the test; and saved in the middle of the test.
        (At("on_step", 6, phase="test", position=1), {"every_updates": 3}),
        (At("on_step", 9, signal.SIGTERM, phase="test", position=1), {}),
    ],
    ids=["killed", "terminated"],
)
def test_res_e_a_test_in_the_middle_of_an_epoch(
    tmp_path: Path, at: At, save: dict[str, Any]
) -> None:
    options = {"test": True, "phases": {"test_every_updates": 3}, "augment": True,
               "hooks": {"counter": r1.Counter()}, "save": save}  # fmt: skip
    folder = tmp_path / "run"
    assert go(folder, at, **options).code in (0, KILLED)
    assert newest(folder).manifest["updates"] == at.updates
    finish(folder, **options)
    assert_eq(undisturbed(**options), folder)


class CarryingStep:
    """A step whose loss depends on what it carries from batch to batch, and that counts itself."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, task: Task) -> None:
        assert task.phase.position or task.carry is None  # a phase starts without
        batch = task.next_batch()
        output = task.forward(batch.input)
        before = torch.zeros(()) if task.carry is None else task.carry["mean"]
        task.carry = {"mean": 0.9 * before + output.detach().mean()}
        loss = task.criterion(output, batch.target) + (output * before).mean()
        if task.train:
            self.calls += 1
            task.backward(loss)
            task.update()

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize(
    "at",
    [
        At("on_forward", 12, signal.SIGTERM, phase="test", position=1),
        At("on_phase_end", 12, phase="test"),
    ],
)
def test_res_e_what_a_step_carries_survives_a_test_in_between(tmp_path: Path, at: At) -> None:
    options: dict[str, Any] = {"train_step": CarryingStep(), "test": True}
    tested = {**options, "phases": {"test_every_updates": 3}, "save": {"every_updates": 3}}
    folder = tmp_path / "run"
    assert go(folder, at, **tested).code in (0, KILLED)
    finish(folder, **tested)
    assert_eq(undisturbed(**tested), folder)
    assert equal.state_of(newest(folder))["steps"] == [{"calls": 30}]
    # And the tests in between do not move the training.
    seldom, often = newest(reference(**options)), newest(folder)
    models = [store.load(saved, contents.MODEL) for saved in (seldom, often)]
    assert list(equal.differ("model", *models)) == []


def test_res_e_an_interrupted_test_reaches_the_early_stop(tmp_path: Path) -> None:
    """The score that makes the run stop comes from a test that is run again."""
    watch = {"early_stop": EarlyStop("test/loss", patience=1, min_delta=1e9)}
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert go(whole, hooks=watch, **TESTED).value["status"] == "stopped"
    assert go(folder, At("on_step", 20, phase="test"), hooks=watch, **TESTED).code == KILLED
    ended = go(folder, hooks=watch, **TESTED)
    assert ended.value["reason"].startswith("early_stop")
    assert ended.value["updates"] == 20  # the first score is the best, the second no better
    assert updates(r1.lives(probe_of(folder))[1]) == []
    assert_eq(whole, folder)


def test_res_f_a_finished_run_goes_on_when_it_is_made_longer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finish(folder, epochs=2, test=True)
    finish(folder, epochs=4, test=True)
    assert [updates(life) for life in r1.lives(probe_of(folder))] == [
        list(range(1, 21)), list(range(21, 41)),
    ]  # fmt: skip
    assert_eq(undisturbed(epochs=4, test=True), folder)


def test_res_f_a_finished_run_says_so_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    finish(folder, epochs=2, test=True)
    before = {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*.pt")}
    names = store.Store(folder / "checkpoints").names()
    rows = (folder / "metrics.jsonl").read_bytes()
    ended = go(folder, epochs=2, test=True)
    assert ended.code == 0
    assert ended.value["status"] == "finished"
    assert ended.value["updates"] == 20
    assert ended.value["final"] == equal.state_of(newest(folder))["metrics"]
    assert "finished" in ended.output
    assert r1.lives(probe_of(folder))[1] == []
    assert before == {path: path.read_bytes() for path in (folder / "checkpoints").rglob("*.pt")}
    assert names == store.Store(folder / "checkpoints").names()
    assert rows == (folder / "metrics.jsonl").read_bytes()


def loaded(folder: Path, **options: Any) -> list[str]:
    """In a new process: what differs between the newest checkpoint and the task that took it."""
    task = r1.make_task(folder, **options)
    hooks = r1.make_hooks(None, {"every_updates": 1}, average=Average(decay=0.9),
                          early_stop=EarlyStop("train/loss", patience=9))  # fmt: skip
    trainer = Trainer(task, hooks)
    saved = newest(folder)
    differences: list[str] = []

    def compare() -> None:
        now = {**contents.small_state(task), **contents._large_state(task)}
        differences.extend(equal.differ("state", equal.state_of(saved), now))
        model = store.load(saved, contents.MODEL)
        differences.extend(equal.differ("model", dict(model), dict(task.raw_state())))

    trainer._walk = compare  # type: ignore[method-assign]
    trainer.train()
    return differences


@pytest.mark.parametrize(("stop", "optimizer_name"), [(30, "sgd"), (14, "sgd"), (20, "adam")])
def test_res_g_right_after_loading_all_is_as_it_was_saved(
    tmp_path: Path, stop: int, optimizer_name: str
) -> None:
    options = {"optimizer_name": optimizer_name, "run": {"log_every": 10}, "test": True,
               "schedule": r1.Plan("warmup_cosine")}  # fmt: skip
    folder = tmp_path / "run"
    place = At("on_step", 14, signal.SIGTERM) if stop == 14 else None
    if stop == 20:
        place = At("on_step", 20, signal.SIGTERM, phase="test", position=1)
    watch = {"average": Average(decay=0.9), "early_stop": EarlyStop("train/loss", patience=9)}
    go(folder, place, hooks=watch, save={"every_updates": 1}, **options)
    state = equal.state_of(newest(folder))
    assert state["optimizers"]["optimizer"]["state"]  # there is something to lose
    assert set(state["hooks"]) >= {"average", "early_stop", "checkpoint", "metrics_file"}
    assert process.result(loaded, folder, **options) == []


class Seeded(Single):
    """A device with a generator of its own, of which a checkpoint made on the CPU has no state."""

    seeds: ClassVar[list[int]] = []

    def seed_device(self, seed: int) -> None:
        self.seeds.append(seed)


def test_res_g_a_generator_that_the_checkpoint_does_not_know_is_seeded(tmp_path: Path) -> None:
    r1.train(tmp_path, epochs=1)
    Seeded.seeds.clear()
    r1.train(tmp_path, epochs=2, seed=0, backend=Seeded("cpu"))
    assert Seeded.seeds == [rng.mix(0, rng.START, 0)]


class Twins(nn.Module):
    """Two Linear(4, 4), one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def train_twins(folder: Path, order: str, epochs: int, groups: bool = False) -> dict[str, Any]:
    """Train Twins with the layers given to the optimizer in ``order``; its momentum by name."""
    model = Twins()
    parameters: list[Any] = [p for name in order for p in getattr(model, name).parameters()]
    if groups:
        parameters = [{"params": list(getattr(model, name).parameters())} for name in order]
    task = Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=Data(TensorData(r1.Samples().x, r1.Samples().y), 4),
        phases=Phases(epochs=epochs),
        run=Run(dir=str(folder), threads=1),
    )
    Trainer(task, r1.make_hooks()).train()
    optimizer = task.optimizers["optimizer"]
    return {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("groups", [False, True])
def test_res_h_optimizer_state_follows_names(tmp_path: Path, groups: bool) -> None:
    process.result(train_twins, tmp_path / "run", "ab", 1, groups)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    whole = process.result(train_twins, tmp_path / "run", "ab", 2, groups)
    swapped = process.result(train_twins, tmp_path / "again", "ba", 2, groups)
    assert whole.keys() == swapped.keys()
    assert all(torch.equal(whole[name], swapped[name]) for name in whole)


def test_res_h_another_set_of_parameters_is_refused_by_name(tmp_path: Path) -> None:
    process.result(train_twins, tmp_path / "run", "ab", 1)
    ended = process.run(train_twins, tmp_path / "run", "a", 2)
    assert ended.code == 1
    assert "CheckpointError" in ended.output
    assert "b.weight" in ended.output and "b.bias" in ended.output


# Of 30 updates, 10 an epoch: a warm-up of 4 updates or of 1 epoch, milestones after 15 and 24
# updates, the composite's border after 9.
@pytest.mark.parametrize(
    ("name", "interval", "stops"),
    [
        ("constant", "update", (10,)),
        ("constant", "epoch", (10,)),
        ("warmup_cosine", "update", (1, 3, 5, 10)),
        ("warmup_cosine", "epoch", (1, 9, 11)),
        ("multi_step", "update", (15, 16)),
        ("multi_step", "epoch", (10, 20)),
        ("composite", "update", (1, 9, 10)),
        ("composite", "epoch", (10, 15)),
    ],
)
def test_res_i_schedules_go_on_where_they_stood(
    tmp_path: Path, name: str, interval: str, stops: tuple[int, ...]
) -> None:
    options = {"schedule": r1.Plan(name, interval)}
    folder = tmp_path / "run"
    for stop in stops:
        assert go(folder, At("on_step", stop, "stop"), **options).value["updates"] == stop
    finish(folder, **options)

    lines = r1.lines(probe_of(folder), "update")
    expected = r1.lines(probe_of(reference(**options)), "update")
    assert [line["rates"] for line in lines] == [line["rates"] for line in expected]
    if name != "constant":
        assert len({rate for line in lines for rate in line["rates"]}) > 1
    assert_eq(undisturbed(**options), folder)


AVERAGES: dict[str, dict[str, Any]] = {
    "ema": {"decay": 0.9, "warmup": True},
    "swa": {"kind": "swa", "start_updates": 12, "every_updates": 3, "buffers": "average"},
    "swa by epochs": {"kind": "swa", "start_epochs": 1},
}


def averaged(kind: str) -> dict[str, Any]:
    """Options of a run with averages and batch norm, tested after every 5th update."""
    return {
        "model": with_batch_norm(),
        "optimizer_name": "adam",
        "hooks": {"average": Average(**AVERAGES[kind]), "skip": r1.SkipSome()},
        "phases": {"test_every_updates": 5},
        **TESTED,
    }


@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize(
    "at",
    [
        At("on_step", 15, phase="test", position=1),
        At("on_step", 20, signal.SIGTERM, phase="test", position=1),
        At("on_update", 17),
    ],
    ids=["killed in a test", "terminated in a test", "killed in training"],
)
def test_res_k_both_sets_go_on(tmp_path: Path, kind: str, at: At) -> None:
    options = averaged(kind)
    hooks = options.pop("hooks")
    save = {**options.pop("save"), "every_updates": 3}
    folder = tmp_path / "run"
    assert go(folder, at, hooks=hooks, save=save, **options).code in (KILLED, 0)
    finish(folder, hooks=hooks, save=save, **options)
    whole = undisturbed(hooks=hooks, save=save, **options)
    averages = equal.state_of(newest(whole))["averages"]["average"]
    raw = store.load(newest(whole), contents.MODEL)
    assert averages.keys() == raw.keys()
    assert any(not torch.equal(averages[name], raw[name]) for name in raw)
    assert_eq(whole, folder)


def test_res_k_saving_and_evaluating_change_nothing_of_the_raw_weights() -> None:
    options = averaged("ema")
    hooks = options.pop("hooks")
    plain = undisturbed(hooks={"skip": r1.SkipSome()}, **options)
    pairs = [
        {**store.load(newest(folder), contents.MODEL), **optimizer_of(folder)}
        for folder in (plain, undisturbed(hooks=hooks, **options))
    ]
    assert list(equal.differ("raw", *pairs)) == []
    metrics = [equal.state_of(newest(f))["metrics"]["test/loss"]
               for f in (plain, undisturbed(hooks=hooks, **options))]  # fmt: skip
    assert metrics[0] != metrics[1]  # what was tested is the average


def optimizer_of(folder: Path) -> dict[str, Any]:
    return {"optimizers": equal.state_of(newest(folder))["optimizers"]}


def test_res_n_the_newest_whole_checkpoint_after_kill(tmp_path: Path) -> None:
    options = {"save": {"every_updates": 5, "keep_last": 2}}
    folder = tmp_path / "run"
    assert go(folder, At("on_forward", 13), **options).code == KILLED
    finish(folder, **options)
    assert [updates(life) for life in r1.lives(probe_of(folder))] == [
        list(range(1, 14)), list(range(11, 31)),
    ]  # fmt: skip
    assert_eq(undisturbed(**options), folder)


def test_res_n_before_the_first_checkpoint_it_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert go(folder, At("on_forward", 3)).code == KILLED
    finish(folder)
    assert updates(r1.lives(probe_of(folder))[1]) == list(range(1, 31))
    assert_eq(undisturbed(), folder)


SAVED: dict[str, Any] = {"save": {"every_updates": 5, "keep_last": 9}}


def name_at(folder: Path, updates: int) -> Path:
    """The newest checkpoint after so many updates."""
    names = store.Store(folder / "checkpoints").names()
    return folder / "checkpoints" / [n for n in names if store.position(n)[0] == updates][-1]


def test_res_n_a_path_outside_is_where_this_run_starts(tmp_path: Path) -> None:
    start = name_at(reference(**SAVED), 15)
    options: dict[str, Any] = {"run": {"resume": str(start)}, **SAVED}
    folder = tmp_path / "run"
    # Killed before it has a checkpoint of its own, and then again after that.
    assert go(folder, At("on_forward", 18), **options).code == KILLED
    assert go(folder, At("on_forward", 22), **options).code == KILLED
    finish(folder, **options)
    assert [updates(life) for life in r1.lives(probe_of(folder))] == [
        [16, 17, 18], list(range(16, 23)), list(range(21, 31)),
    ]  # fmt: skip
    assert [row["update"] for row in equal.rows(folder) if "loss" in row] == list(range(16, 31))
    whole, part = newest(reference(**SAVED)), newest(folder)
    for file in (contents.MODEL, contents.STATE):
        pairs = [store.load(saved, file) for saved in (whole, part)]
        assert list(equal.differ(file.removesuffix(".pt"), *pairs)) == []
    assert start.is_dir()  # not this run's to remove

    again = go(folder, **options)  # finished: the same command has nothing to do
    assert again.code == 0 and updates(r1.lives(probe_of(folder))[3]) == []


def test_res_n_started_from_another_file_and_then_without_naming_it(tmp_path: Path) -> None:
    start = name_at(reference(**SAVED), 15)
    folder = tmp_path / "run"
    go(folder, At("on_forward", 22), run={"resume": str(start)}, **SAVED)
    finish(folder, **SAVED)
    assert updates(r1.lives(probe_of(folder))[1]) == list(range(21, 31))
    # The origin is remembered: the first command too goes on from what is newest.
    ended = go(folder, run={"resume": str(start)}, epochs=4, **SAVED)
    assert ended.code == 0, ended.output
    assert updates(r1.lives(probe_of(folder))[2]) == list(range(31, 41))


@pytest.mark.parametrize(("spelling", "keep_last"), [("absolute", 1), ("link", 9)])
def test_res_n_a_path_inside_goes_back_to_it(tmp_path: Path, spelling: str, keep_last: int) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference(**SAVED), folder)
    shutil.copy(probe_of(reference(**SAVED)), probe_of(folder))
    start = name_at(folder, 15)
    (tmp_path / "link").symlink_to(tmp_path)
    path = {
        "absolute": start,
        "link": tmp_path / "link" / "run" / "checkpoints" / start.name,
    }[spelling]
    options: dict[str, Any] = {"run": {"resume": str(path)},
                               "save": {"every_updates": 5, "keep_last": keep_last}}  # fmt: skip
    assert go(folder, At("on_forward", 22), **options).code == KILLED
    lives = r1.lives(probe_of(folder))
    assert updates(lives[1]) == list(range(16, 23))
    aside = [p.name for p in (folder / "checkpoints" / "set_aside").iterdir()]
    assert {store.position(name)[0] for name in aside} == {20, 25, 30}
    assert [row["update"] for row in equal.rows(folder) if "loss" in row] == list(range(1, 23))

    finish(folder, **options)  # the same command: from the descendant, not from PATH again
    assert updates(r1.lives(probe_of(folder))[2]) == list(range(21, 31))
    assert_eq(undisturbed(**SAVED), folder)
    assert go(folder, **options).code == 0
    assert updates(r1.lives(probe_of(folder))[3]) == []


def test_res_n_a_path_into_another_runs_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(reference(**SAVED), folder)
    other = name_at(reference(optimizer_name="adam", **SAVED), 15)
    ended = go(folder, run={"resume": str(other)}, **SAVED)
    assert ended.code == 1
    assert "run.resume" in ended.output and "run.dir" in ended.output
    assert equal.state_of(newest(folder))["progress"]["updates"] == 30


def test_res_n_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    ended = go(tmp_path / "run", run={"resume": str(tmp_path / "nothing")})
    assert ended.code == 1
    assert "run.resume" in ended.output and "nothing" in ended.output


def test_res_n_never_puts_the_old_run_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {"run": {"resume": "never"}}
    shutil.copytree(reference(), folder)
    finish(folder, **options)
    assert_eq(undisturbed(), folder)
    assert newest(tmp_path / "run.old-1").manifest["updates"] == 30
    finish(folder, **options)
    assert newest(tmp_path / "run.old-2").manifest["updates"] == 30


# --- any instant ---

EVERYTHING: dict[str, Any] = {
    "test": True,
    "augment": True,
    "optimizer_name": "adam",
    "data": {"micro_batch_size": 3},
    "phases": {"test_every_updates": 4},
    "run": {"log_every": 3},
    "save": {"every_updates": 3, "keep_last": 2, "keep_best": 1, "metric": "test/loss"},
    "hooks": {"average": Average(decay=0.9), "early_stop": EarlyStop("test/loss", patience=50)},
}


def kill_by_calls(folder: Path, rng: random.Random, calls: int) -> bool:
    """One process, killed at a random call; whether it was done before."""
    instant = rng.randrange(1, calls)
    options = {**EVERYTHING}
    ended = process.run(
        r1.train_until, instant, signal.SIGKILL, folder, probe_of(folder), **options
    )
    assert ended.code in (KILLED, 0), ended.output
    return ended.code == 0


def kill_by_clock(folder: Path, rng: random.Random, seconds: float) -> bool:
    """One process, killed after a random time; whether it was done before."""
    running = process.start(r1.train, folder, probe_of(folder), **EVERYTHING)
    time.sleep(rng.uniform(0, seconds))
    running.send(signal.SIGKILL)
    ended = running.wait()
    assert ended.code in (KILLED, 0), ended.output
    return ended.code == 0


def counted_calls(tmp_path: Path) -> int:
    """Calls and returns in the whole of the run."""
    folder = tmp_path / "counted"
    calls: int = process.result(r1.count_calls, folder, probe_of(folder), **EVERYTHING)
    assert_eq(undisturbed(**EVERYTHING), folder)
    return calls


def test_res_o_killed_at_any_instant(tmp_path: Path) -> None:
    rng, folder = random.Random(1), tmp_path / "run"
    calls = counted_calls(tmp_path)
    for _ in range(6):
        kill_by_calls(folder, rng, calls)
    finish(folder, **EVERYTHING)
    assert_eq(undisturbed(**EVERYTHING), folder)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["calls", "clock"])
def test_res_o_killed_fifty_times(tmp_path: Path, way: str) -> None:
    rng = random.Random(way)
    calls = counted_calls(tmp_path)
    start = time.monotonic()
    finish(tmp_path / "timed", **EVERYTHING)
    seconds = time.monotonic() - start
    kills = 0
    while kills < 50:
        folder = tmp_path / f"run-{kills}"
        done = False
        while not done:
            done = (
                kill_by_calls(folder, rng, calls)
                if way == "calls"
                else kill_by_clock(folder, rng, seconds)
            )
            kills += not done
        assert_eq(undisturbed(**EVERYTHING), folder)
