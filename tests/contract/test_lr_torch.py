"""LR: torch's own schedulers: when they move, what is logged, and exact resumes."""

from __future__ import annotations

import copy
import io
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from phaseloop import (
    ConfigError,
    Data,
    MetricError,
    Order,
    PhaseloopError,
    Phases,
    Run,
    Schedule,
    Task,
    TorchSchedule,
)
from phaseloop.engine.checkpoint.contents import check_plain
from phaseloop.engine.schedules import Rates, constant, cosine
from phaseloop.engine.schedules.torch_schedule import Mover
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.meter_sync import MeterSync
from phaseloop.hooks.metrics_file import MetricsFile
from tests.rigs import equal, process, r1
from tests.rigs.equal import assert_eq, probe_of, reference, undisturbed
from tests.rigs.probes import RecordingSGD, Scripted, SkipAt, watch
from tests.rigs.r0 import numbers, r0, train
from tests.rigs.r1 import At

pytestmark = pytest.mark.filterwarnings("error")  # torch warns of moves in the wrong order


def halve(optimizer: Optimizer) -> LRScheduler:
    """Half the rate at each move."""
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def plateau(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)


def used(task: Task) -> list[float]:
    """The rate of each update, by the optimizer's own record."""
    optimizer = task.optimizers["optimizer"]
    assert isinstance(optimizer, RecordingSGD)
    return [rate for (rate,) in optimizer.rates]


def mover(task: Task) -> Mover:
    found = task.rates["optimizer"].mover
    assert found is not None
    return found


# --- LR-a and LR-c, for torch's ---


def test_lr_a_update_k_of_n_uses_the_schedulers_value_after_k_minus_1_moves() -> None:
    task = r0(range(6), 1, optimizer=RecordingSGD, schedule=TorchSchedule(halve))
    train(task, learning_rate=LearningRate())
    assert used(task) == [0.5**k for k in range(6)]


@pytest.mark.parametrize("skipped", [(), (3,), (1, 4, 5)])
def test_lr_c_what_is_logged_is_what_was_used_and_a_skipped_update_moves_nothing(
    tmp_path: Path, skipped: tuple[int, ...]
) -> None:
    task = r0(
        range(6), 1, phases=Phases(updates=6), optimizer=RecordingSGD,
        schedule=TorchSchedule(halve), run=Run(str(tmp_path), log_every=1),
    )  # fmt: skip
    skip = SkipAt(*skipped)
    train(task, learning_rate=LearningRate(), file=MetricsFile(), skip=skip)
    assert used(task) == [0.5**k for k in range(6)]
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [row["lr"] for row in lines if "loss" in row] == [0.5**k for k in range(6)]


def test_lr_c_at_a_phases_end_the_groups_still_hold_what_was_used() -> None:
    """So the console's line of an epoch shows the rate of that epoch."""
    at_end = watch("on_phase_end", lambda task: task.optimizers["optimizer"].param_groups[0]["lr"])
    task = r0(range(2), 1, epochs=3, schedule=TorchSchedule(halve, interval="epoch"))
    train(task, learning_rate=LearningRate(), at_end=at_end)
    assert at_end.seen == [1, 0.5, 0.25]


# --- LR-f: plateau ---

SCORES = [1, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99, 1]
RATES = [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]
"""After each score: contract.md."""


def scored(scores: list[float], schedule: Any, **options: Any) -> Task:
    """R0, an update an epoch, and a test that reports the scores."""
    return r0(
        [1], 1, epochs=len(scores), optimizer=RecordingSGD, schedule=schedule,
        test=Data(numbers([1]), 1), test_meters={"score": Scripted(scores)}, **options,
    )  # fmt: skip


def test_lr_f_a_plateau_moves_once_for_each_new_value_of_its_metric() -> None:
    task = scored([*SCORES, 1], TorchSchedule(plateau, metric="test/score"))
    train(task, sync=MeterSync(), learning_rate=LearningRate())
    assert used(task) == [1, *RATES]
    assert mover(task).moves == 9


def test_lr_f_the_last_value_counts_too() -> None:
    task = scored(SCORES, TorchSchedule(plateau, metric="test/score"))
    train(task, sync=MeterSync(), learning_rate=LearningRate())
    assert task.optimizers["optimizer"].param_groups[0]["lr"] == RATES[-1]


def test_lr_f_phases_that_do_not_report_the_metric_move_nothing() -> None:
    """Five updates an epoch, and a test after every second epoch only."""
    schedule = TorchSchedule(
        lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0), metric="test/score"
    )
    task = r0(
        range(5), 1, phases=Phases(epochs=4, test_every_epochs=2), schedule=schedule,
        optimizer=RecordingSGD, test=Data(numbers([1]), 1), test_meters={"score": Scripted([1, 2])},
    )  # fmt: skip
    train(task, sync=MeterSync(), learning_rate=LearningRate())
    assert used(task) == [1.0] * 20
    assert mover(task).moves == 2
    assert task.optimizers["optimizer"].param_groups[0]["lr"] == 0.5


def test_lr_f_a_missing_metric_is_an_error_before_the_first_update() -> None:
    task = scored(SCORES, TorchSchedule(plateau, metric="test/scoer"))
    with pytest.raises(ConfigError, match=r"schedule\.metric: .*'test/scoer'.*'test/score'"):
        train(task, sync=MeterSync(), learning_rate=LearningRate())
    assert used(task) == []


def test_lr_f_a_metric_that_does_not_come_is_an_error_with_the_names_there_are() -> None:
    class Several(Scripted):
        def compute(self) -> Any:
            return {"a": 1.0, "b": 2.0}

    task = r0(
        [1], 1, epochs=3, schedule=TorchSchedule(plateau, metric="test/score/c"),
        test=Data(numbers([1]), 1), test_meters={"score": Several([1], None)},
    )  # fmt: skip
    with pytest.raises(MetricError, match=r"'test/score/c'.*test/loss, test/score/a, test/score/b"):
        train(task, sync=MeterSync(), learning_rate=LearningRate())


def test_lr_f_not_strict_a_missing_metric_is_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = scored(SCORES, TorchSchedule(plateau, metric="test/scoer", strict=False))
    train(task, sync=MeterSync(), learning_rate=LearningRate())
    assert used(task) == [1.0] * 8
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "test/scoer" in warnings[0] and "test/score" in warnings[0]


def test_lr_f_a_plateau_that_waits_for_the_wrong_direction_is_refused() -> None:
    task = r0(
        [1], 1, schedule=TorchSchedule(plateau, metric="test/score"),
        test=Data(numbers([1]), 1), test_meters={"score": Scripted([1], higher_is_better=True)},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"schedule\.mode: is 'min', but a higher test/score"):
        train(task, sync=MeterSync(), learning_rate=LearningRate())


# --- LR-g: interval and frequency ---


@pytest.mark.parametrize(("frequency", "moves"), [(2, 10), (10, 2), (1, 20), (3, 6)])
def test_lr_g_frequency_counts_updates_over_the_whole_run(frequency: int, moves: int) -> None:
    schedule = TorchSchedule(halve, frequency=frequency)
    task = r0(range(5), 1, epochs=4, optimizer=RecordingSGD, schedule=schedule)
    train(task, learning_rate=LearningRate())
    assert used(task) == [0.5 ** (k // frequency) for k in range(20)]
    assert mover(task).moves == moves
    assert task.optimizers["optimizer"].param_groups[0]["lr"] == 0.5**moves


@pytest.mark.parametrize(("frequency", "moves"), [(1, 4), (2, 2), (3, 1), (5, 0)])
def test_lr_g_by_epoch(frequency: int, moves: int) -> None:
    schedule = TorchSchedule(halve, interval="epoch", frequency=frequency)
    task = r0(range(5), 1, epochs=4, optimizer=RecordingSGD, schedule=schedule)
    train(task, learning_rate=LearningRate())
    assert used(task) == [0.5 ** (k // 5 // frequency) for k in range(20)]
    assert mover(task).moves == moves


def test_lr_g_an_epoch_that_was_not_finished_is_no_epoch() -> None:
    schedule = TorchSchedule(halve, interval="epoch")
    task = r0(range(5), 1, phases=Phases(updates=7), schedule=schedule)
    train(task, learning_rate=LearningRate())
    assert mover(task).moves == 1


# --- resumes ---


def step(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)


def one_cycle(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=30)


def annealing(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)


def multi_step(optimizer: Optimizer) -> LRScheduler:
    """Its milestones are a Counter, which no checkpoint may hold."""
    return lr_scheduler.MultiStepLR(optimizer, milestones=[4, 13, 13, 20])


def sequence(optimizer: Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), annealing(optimizer)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


def never_good_enough(optimizer: Optimizer) -> LRScheduler:
    """Wants the loss to fall by 100 each time: lowers the rate from the second value on."""
    return lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=100, threshold_mode="abs"
    )


SCHEDULES: dict[str, TorchSchedule] = {
    "step": TorchSchedule(step, frequency=2),
    "one cycle": TorchSchedule(one_cycle),
    "annealing by epoch": TorchSchedule(annealing, interval="epoch"),
    "multi step": TorchSchedule(multi_step),
    "sequence": TorchSchedule(sequence),
    "plateau": TorchSchedule(never_good_enough, metric="test/loss"),
    "plateau of the training": TorchSchedule(never_good_enough, metric="train/loss"),
}
BREAKS = {
    "in mid-epoch": At("on_forward", 13),
    "stopped in mid-epoch": At("on_step", 14, signal.SIGTERM),
    "at an epoch's end": At("on_step", 10),
    "at an epoch's very end": At("on_phase_end", 10),
    "at the next epoch's start": At("on_phase_start", 10),
    "in a test": At("on_step", 20, phase="test", position=1),
    "stopped in a test": At("on_forward", 20, signal.SIGTERM, phase="test"),
    "at a test's end, unsaved": At("on_phase_end", 20, phase="test", order=Order.LOG),
    "at a test's end": At("on_phase_end", 20, phase="test"),
    "before the last update": At("on_step", 29),
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("step", place) for place in BREAKS),
        *(("plateau", place) for place in BREAKS),
        *((name, place) for name in ("one cycle", "annealing by epoch")
          for place in ("in mid-epoch", "at an epoch's end", "in a test")),
        ("multi step", "in mid-epoch"),
        ("sequence", "in mid-epoch"),
        ("plateau of the training", "at an epoch's very end"),
    ],
)  # fmt: skip
def test_res_i_a_scheduler_of_torchs_goes_on_where_it_stood(
    tmp_path: Path, name: str, place: str
) -> None:
    options: dict[str, Any] = {"schedule": SCHEDULES[name], "test": True}
    if name == "one cycle":
        options["optimizer_name"] = "adam"  # of which it moves the first of betas too
    folder, save = tmp_path / "run", {"every_updates": 5}
    broken = go(folder, hooks={"at": BREAKS[place]}, save=save, **options)
    assert broken.code in (0, -signal.SIGKILL), broken.output
    ended = go(folder, save=save, **options)
    assert ended.code == 0, ended.output
    assert "lr_scheduler.step()" not in broken.output + ended.output  # torch's warning

    lines = [line for life in r1.lives(probe_of(folder)) for line in life]
    assert len({rate for line in lines for rate in line["rates"]}) > 1
    assert_eq(undisturbed(**options), folder)


def go(folder: Path, **options: Any) -> process.Ended:
    return process.run(r1.train, folder, probe_of(folder), **options)


def test_res_g_right_after_loading_the_scheduler_is_as_it_was(tmp_path: Path) -> None:
    folder = reference(schedule=SCHEDULES["plateau"], test=True)
    state = equal.state_of(equal.newest(folder))["schedules"]["optimizer"]
    assert state["moves"] == 2 and len(state["pending"]) == 1  # the last test's
    task = r1.make_task(None, schedule=SCHEDULES["plateau"], test=True)
    task.build()
    mover(task).load_state_dict(state)
    assert list(equal.differ("schedule", state, mover(task).state_dict())) == []


def test_a_checkpoint_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert go(folder, epochs=1, schedule=TorchSchedule(step)).code == 0
    other = go(folder, epochs=2, schedule=SCHEDULES["multi step"])
    assert other.code == 1 and "a StepLR, this task a MultiStepLR" in other.output
    without = go(folder, epochs=2)
    assert without.code == 1 and "schedule.optimizer.0" in without.output


MAKE: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": step,
    "MultiStepLR": multi_step,
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": halve,
    "SequentialLR": sequence,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=9, power=2.0),
    "CosineAnnealingLR": annealing,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([halve(o), multi_step(o)]),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": one_cycle,
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=5),
}


@pytest.mark.parametrize("name", MAKE)
def test_every_scheduler_of_torchs_can_be_saved_and_continued(name: str) -> None:
    """5 moves, saved as a checkpoint is, loaded into fresh ones, 6 more: as 11 in one go."""

    def made() -> tuple[Optimizer, Mover]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, Mover(TorchSchedule(MAKE[name]), optimizer)

    optimizer, first = made()
    before = []
    for k in range(12):
        first.set(k, 0)
        before.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        if k == 5:
            file = io.BytesIO()
            check_plain(first.state_dict())
            torch.save([first.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
    again, second = made()
    state, groups = torch.load(file, weights_only=True)
    again.load_state_dict(groups)
    second.load_state_dict(copy.deepcopy(state))
    after = []
    for k in range(6, 12):
        second.set(k, 0)
        after.append((again.param_groups[0]["lr"], again.param_groups[0]["momentum"]))
    assert after == before[6:]
    assert len(set(before)) > 1


def test_every_scheduler_of_torchs_is_covered() -> None:
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, LRScheduler) and not name.startswith("_")
    }
    assert kinds - {"LRScheduler", "ReduceLROnPlateau"} == set(MAKE) - {"SWALR"}


# --- what cannot be ---


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"interval": "batch"}, "interval"),
        ({"frequency": 0}, "frequency"),
        ({"metric": "test/loss", "interval": "epoch"}, "interval"),
        ({"metric": "test/loss", "frequency": 2}, "frequency"),
        ({"strict": False}, "strict"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        TorchSchedule(halve, **options)
    assert error.value.key == f"schedule.{key}"


@pytest.mark.parametrize(
    ("schedules", "text"),
    [
        ([TorchSchedule(halve), TorchSchedule(step)], "takes one scheduler"),
        ([TorchSchedule(halve), Schedule(cosine())], "sets the same option 'lr'"),
        ([TorchSchedule(one_cycle), Schedule(constant(), option="momentum")], "'momentum'"),
        ([TorchSchedule(plateau)], "needs one, such as test/loss"),
        ([TorchSchedule(halve, metric="test/loss")], "takes no metric"),
        ([TorchSchedule(lambda o: 3)], "int is not a scheduler"),  # type: ignore[arg-type, return-value]
    ],
)
def test_schedules_that_do_not_go_together_are_refused(schedules: list[Any], text: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match=text):
        Rates(optimizer, schedules)


def test_beside_one_of_torchs_another_option_may_have_a_schedule() -> None:
    decay = Schedule(cosine(), option="weight_decay")
    decay.plan(4, 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, weight_decay=0.5)
    rates = Rates(optimizer, [TorchSchedule(halve), decay])
    assert rates.options == ["lr", "weight_decay"]
    rates.set(2, 0)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.5 * (1 + math.cos(math.pi / 2)) / 2)


def test_a_scheduler_for_another_optimizer_is_refused() -> None:
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    with pytest.raises(ConfigError, match="another optimizer"):
        Rates(one, [TorchSchedule(lambda _: halve(other))])


def test_a_group_added_later_is_an_error_that_says_why() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    rates = Rates(optimizer, [TorchSchedule(halve)])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(PhaseloopError, match="a parameter group was added after ExponentialLR"):
        rates.set(1, 0)


def two_layers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """An optimizer for each linear layer."""
    return {
        "first": torch.optim.SGD(model[0].parameters(), lr=0.1),  # type: ignore[index]
        "last": torch.optim.SGD(model[3].parameters(), lr=0.1),  # type: ignore[index]
    }


def exponential(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


def test_a_stop_is_no_end_for_a_scheduler(tmp_path: Path) -> None:
    """Stopped after update 4, between two steps of the second optimizer: what is logged for update
    5 is what the second used at update 4."""
    options: dict[str, Any] = {
        "optimizer": two_layers, "every": {"last": 2}, "schedule": TorchSchedule(exponential),
        "epochs": 1,
    }  # fmt: skip
    folder = tmp_path / "run"
    stopped = process.run(
        r1.train, folder, probe_of(folder), hooks={"at": At("on_step", 4, "stop")}, **options
    )
    assert stopped.code == 0, stopped.output
    process.result(r1.train, folder, probe_of(folder), **options)
    row = next(row for row in equal.rows(folder) if row.get("update") == 5)
    assert row["last/lr"] == pytest.approx(0.1 * 0.9)  # its second step; the first used .1
    assert_eq(undisturbed(**options), folder)


def short_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)


def test_a_scheduler_that_is_over_before_the_run_is_named() -> None:
    """Six updates ask it for five moves, and torch lets it make three."""
    task = r0([1] * 6, 1, schedule=TorchSchedule(short_cycle))
    with pytest.raises(ConfigError, match=r"schedule: OneCycleLR at move 4: .*total steps"):
        train(task, learning_rate=LearningRate())
