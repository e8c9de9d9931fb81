"""LR: schedules. Each update uses the value of its own position, and that value is logged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phaseloop import (
    Data,
    GroupRules,
    Phases,
    Run,
    Schedule,
    Task,
    TensorData,
    Warmup,
    parameter_groups,
)
from phaseloop.engine import registry
from phaseloop.engine.schedules import (
    Stretch,
    composite,
    constant,
    cosine,
    cosine_restarts,
    linear,
    multi_step,
)
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.metrics_file import MetricsFile
from tests.rigs import equal, process, r1
from tests.rigs.equal import assert_eq, probe_of
from tests.rigs.probes import Break, BreakAt, RecordingSGD, SkipAt
from tests.rigs.r0 import r0, train
from tests.rigs.r1 import At

# One set of options for each registered schedule; a new one without options here fails below.
CURVES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"end": 0.01},
    "cosine": {},
    "multi_step": {"milestones": [0.2, 0.6]},
    "step": {"steps": 3},
    "polynomial": {"power": 2.0},
    "exponential": {"decay": 0.1},
    "cosine_restarts": {"cycles": 3, "growth": 2.0, "decay": 0.5},
    "inverse_sqrt": {"length": 0.2, "unit": "fraction"},
    "composite": {
        "parts": [{"name": "linear", "start": 0.6, "end": 4.8}, {"name": "cosine"}],
        "lengths": [0.1, 0.9],
    },
}
WARMUPS = [None, Warmup(0.0, updates=1), Warmup(1e-4, fraction=0.5), Warmup(1e-4, epochs=0.5)]

Build = Callable[[float, Stretch], Callable[[float], float]]


def curve(name: str) -> Build:
    """A registered schedule with the options above."""
    return registry.schedules.get(name).target(**CURVES[name])


def spied(build: Build, asked: list[float]) -> Build:
    """``build`` whose curves write down every position that they are asked for."""

    def build_spied(base: float, stretch: Stretch) -> Callable[[float], float]:
        inner = build(base, stretch)

        def ask(where: float) -> float:
            asked.append(where)
            return inner(where)

        return ask

    return build_spied


def recording(task: Task) -> RecordingSGD:
    """The recording optimizer of a task."""
    optimizer = task.optimizers["optimizer"]
    assert isinstance(optimizer, RecordingSGD)
    return optimizer


def test_lr_a_every_registered_schedule_is_covered() -> None:
    assert {entry.name for entry in registry.schedules} >= set(CURVES)
    ours = {e.name for e in registry.schedules if e.target.__module__.startswith("phaseloop.")}
    assert ours == set(CURVES)


@pytest.mark.parametrize("updates", [1, 2, 3, 10])
@pytest.mark.parametrize("name", sorted(CURVES))
def test_lr_a_update_k_of_n_uses_position_k_minus_1_over_n(name: str, updates: int) -> None:
    asked: list[float] = []
    build = curve(name)
    task = r0(
        range(updates), 1, lr=0.1, optimizer=RecordingSGD, schedule=Schedule(spied(build, asked))
    )
    train(task, learning_rate=LearningRate())
    assert asked == [k / updates for k in range(updates)]
    assert recording(task).rates == [
        [build(0.1, Stretch(updates, 1))(k / updates)] for k in range(updates)
    ]


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(CURVES))
def test_lr_a_by_epoch_each_epoch_uses_its_own_position(name: str, epochs: int) -> None:
    asked: list[float] = []
    build = curve(name)
    schedule = Schedule(spied(build, asked), interval="epoch")
    task = r0(range(2), 1, lr=0.1, epochs=epochs, optimizer=RecordingSGD, schedule=schedule)
    train(task, learning_rate=LearningRate())
    assert asked == [k / epochs for k in range(epochs) for _ in range(2)]
    assert recording(task).rates == [
        [build(0.1, Stretch(2 * epochs, epochs))(where)] for where in asked
    ]


@pytest.mark.parametrize(
    ("updates", "warmup"),
    # A warm-up as long as the training is refused.
    [(n, w) for n in (1, 2, 3, 7, 10) for w in WARMUPS if n > 1 or w is None or w.updates is None],
)
@pytest.mark.parametrize("name", sorted(CURVES))
def test_lr_a_no_curve_is_ever_asked_for_its_end(
    name: str, updates: int, warmup: Warmup | None
) -> None:
    asked: list[float] = []
    schedule = Schedule(spied(curve(name), asked), warmup=warmup)
    # The length is given in updates and two windows are skipped: more windows than updates.
    task = r0(
        range(updates), 1, lr=0.1, schedule=schedule,
        phases=Phases(updates=updates), optimizer=RecordingSGD,
    )  # fmt: skip
    train(task, learning_rate=LearningRate(), skip=SkipAt(1, updates + 1))
    assert len(recording(task).rates) == updates
    assert asked
    assert all(0 <= where < 1 for where in asked)


@pytest.mark.parametrize("interval", ["update", "epoch"])
def test_lr_a_position_stays_below_1_when_skips_make_the_run_longer(interval: str) -> None:
    asked: list[float] = []
    schedule = Schedule(spied(cosine(), asked), interval=interval)
    task = r0(range(3), 1, phases=Phases(updates=3), schedule=schedule)
    outcome = train(task, learning_rate=LearningRate(), skip=SkipAt(1, 2, 3, 4))
    assert outcome.updates == 3
    assert task.progress.epoch == 3  # 7 windows: four skipped, three that counted
    assert all(0 <= where < 1 for where in asked)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_lr_a_resumed_before_the_last_update(name: str, tmp_path: Path) -> None:
    updates = 6
    asked: list[float] = []

    def make() -> Task:
        return r0(
            range(updates), 1, lr=0.1, optimizer=RecordingSGD, run=Run(str(tmp_path)),
            schedule=Schedule(spied(curve(name), asked)),
        )  # fmt: skip

    hooks = {"learning_rate": LearningRate(), "checkpoint": Checkpoint(every_updates=1)}
    with pytest.raises(Break):
        train(make(), **hooks, stop=BreakAt(updates - 1))
    asked.clear()
    task = make()
    train(task, learning_rate=LearningRate())
    assert task.resumed
    last = (updates - 1) / updates
    assert asked == [last]
    assert recording(task).rates == [[curve(name)(0.1, Stretch(updates, 1))(last)]]


@pytest.mark.parametrize(
    "length", [{"updates": 5}, {"epochs": 2.5}, {"fraction": 0.5}], ids=lambda d: next(iter(d))
)
def test_lr_b_warm_up_begins_with_the_first_update(length: dict[str, Any]) -> None:
    warmup = Warmup(start=1e-4, **length)  # 5 of 10 updates, said in three ways
    task = r0(
        range(2), 1, lr=0.1, epochs=5, optimizer=RecordingSGD,
        schedule=Schedule(constant(), warmup=warmup),
    )  # fmt: skip
    train(task, learning_rate=LearningRate())
    rates = [rate for (rate,) in recording(task).rates]
    assert rates[0] == 1e-4
    rise = [1e-4 + (0.1 - 1e-4) * k / 5 for k in range(5)]
    assert rates == pytest.approx([*rise, *[0.1] * 5], rel=1e-12)


def two_groups(schedule: Schedule, run: Run) -> Task:
    """Two layers with learning rates .1 and .01, 8 updates, recorded by the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    return Task(
        model=model,
        criterion=lambda output, _: output.mean(),
        optimizer=RecordingSGD(groups, lr=0.01),
        train=Data(TensorData(torch.arange(8.0).unsqueeze(1)), 1),
        phases=Phases(updates=8),
        schedule=schedule,
        run=run,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    """The training rows of ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row.get("phase") == "train" and "loss" in row]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("skipped", [(), (3,), (1, 4, 5)])
def test_lr_c_what_is_logged_is_what_that_update_used(
    tmp_path: Path, skipped: tuple[int, ...], every: int
) -> None:
    run = Run(str(tmp_path), log_every=every)
    task = two_groups(Schedule(cosine(), warmup=Warmup(0.001, updates=2)), run)
    hooks = {"learning_rate": LearningRate(), "file": MetricsFile(), "skip": SkipAt(*skipped)}
    train(task, **hooks)
    used = recording(task).rates  # of updates that were made; a skipped window makes none
    logged = {row["update"]: [row["lr/0"], row["lr/1"]] for row in rows(tmp_path)}
    assert logged == {k: used[k - 1] for k in range(every, 9, every)}
    assert len({tuple(pair) for pair in used}) == 8  # so that a shift by one would show
    assert all(a != b for a, b in used[1:2] + used[3:])


def test_lr_c_one_group_and_named_groups_are_logged_by_their_names(tmp_path: Path) -> None:
    run = Run(str(tmp_path), log_every=1)
    task = two_groups(Schedule(constant()), run)
    for name, group in zip(["body", "head"], task.given_optimizer.param_groups, strict=True):
        group["name"] = name
    train(task, learning_rate=LearningRate(), file=MetricsFile())
    assert [(row["lr/body"], row["lr/head"]) for row in rows(tmp_path)] == [(0.1, 0.01)] * 8


def test_lr_d_a_composite_begins_each_part_where_it_is_due() -> None:
    both = registry.schedules.get("composite").target(**CURVES["composite"])(4.8, Stretch(1, 1))
    wheres = [0, 0.05, 0.0999999, 0.1, 0.55, 0.999]
    contract = [0.6, 2.7, 4.8, 4.8, 2.4, 1.5e-05]
    assert [f"{both(where):.2g}" for where in wheres] == [f"{value:.2g}" for value in contract]
    linear = [0.6 + (4.8 - 0.6) * where / 0.1 for where in wheres[:3]]
    cosines = [4.8 * (1 + math.cos(math.pi * (where - 0.1) / 0.9)) / 2 for where in wheres[3:]]
    assert [both(where) for where in wheres] == pytest.approx([*linear, *cosines], abs=1e-12)


def test_lr_d_no_update_of_a_long_run_takes_a_part_too_early() -> None:
    # fvcore's composite begins a part 1e-6 early: 3 updates of 3 million.
    both = registry.schedules.get("composite").target(**CURVES["composite"])(4.8, Stretch(1, 1))
    n = 3_000_000
    for k in range(n // 10 - 5, n // 10):
        assert both(k / n) == pytest.approx(0.6 + 4.2 * (k / n) / 0.1, rel=1e-12)


@pytest.mark.parametrize("name", sorted(CURVES))
def test_lr_d_warm_up_is_never_dropped(name: str) -> None:
    schedule = Schedule(curve(name), warmup=Warmup(0.001, fraction=0.1))
    schedule.plan(1000, 10)
    main = curve(name)(0.1, Stretch(900, 9, 100, 1))
    top = main(0.0)
    assert schedule.value(0.1, 0, 0) == 0.001
    assert schedule.value(0.1, 50, 0) == pytest.approx((0.001 + top) / 2)
    assert schedule.value(0.1, 100, 0) == top
    assert schedule.value(0.1, 550, 0) == pytest.approx(main(0.5))


def test_lr_d_changing_one_value_never_changes_another() -> None:
    def values(**changes: Any) -> list[float]:
        options = {"first": 0.6, "top": 4.8, "end": 0.0, **changes}
        build = composite(
            [
                {"name": "linear", "start": options["first"], "end": options["top"]},
                {"name": "cosine", "end": options["end"]},
            ],
            [0.1, 0.9],
        )
        return [build(4.8, Stretch(100, 1))(k / 100) for k in range(100)]

    base = values()
    assert values(first=0.1)[10:] == base[10:]
    assert values(end=1.0)[:10] == base[:10]
    assert values(end=1.0)[50] != base[50]


def test_lr_d_the_base_of_one_group_never_moves_anothers() -> None:
    def made() -> Schedule:
        schedule = Schedule(cosine(), warmup=Warmup(0.01, fraction=0.2))
        schedule.plan(10, 1)
        return schedule

    alone = [[made().value(base, k, 0) for k in range(10)] for base in (0.5, 0.1)]
    shared = made()
    both = [(shared.value(0.5, k, 0), shared.value(0.1, k, 0)) for k in range(10)]
    assert [list(values) for values in zip(*both, strict=True)] == alone
    assert alone[0] != alone[1]


def test_lr_e_a_longer_run_spreads_the_schedule_over_the_new_total(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(epochs: int) -> Task:
        return r0(
            range(5), 1, lr=0.1, epochs=epochs, optimizer=RecordingSGD, run=Run(str(tmp_path)),
            schedule=Schedule(cosine(), warmup=Warmup(0.01, fraction=0.1)),
        )  # fmt: skip

    hooks = {"learning_rate": LearningRate(), "checkpoint": Checkpoint()}
    train(make(2), **hooks)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    longer = make(4)
    outcome = train(longer, **hooks)
    assert outcome.updates == 20

    # Updates 11 to 20 of 20, of which a tenth is warm-up.
    wheres = [(k / 20 - 0.1) / 0.9 for k in range(10, 20)]
    expected = [0.1 * (1 + math.cos(math.pi * where)) / 2 for where in wheres]
    assert [rate for (rate,) in recording(longer).rates] == pytest.approx(expected, rel=1e-12)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "10" in warnings[0]
    assert "20" in warnings[0]


def test_lr_e_the_same_length_gives_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Task:
        return r0(range(5), 1, epochs=2, run=Run(str(tmp_path)), schedule=Schedule(cosine()))

    hooks = {"learning_rate": LearningRate(), "checkpoint": Checkpoint(every_updates=1)}
    with pytest.raises(Break):
        train(make(), **hooks, stop=BreakAt(7))
    task = make()
    assert train(task, **hooks).updates == 10
    assert task.resumed
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_lr_schedules_of_other_options_move_too() -> None:
    """Two schedules at once; the values are those that each update used."""
    used: list[tuple[float, float]] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            used.append((self.param_groups[0]["lr"], self.param_groups[0]["momentum"]))
            return super().step(closure)

    def make(params: Any, lr: float) -> Spy:
        return Spy(params, lr=lr, momentum=0.8)

    halve = Schedule(multi_step([0.5], factors=[0.5]), option="momentum")
    rate = Schedule(linear())
    train(r0(range(4), 1, optimizer=make, schedule=[rate, halve]), learning_rate=LearningRate())
    assert used == [(1.0, 0.8), (0.75, 0.8), (0.5, 0.4), (0.25, 0.4)]


def by_rule(model: nn.Module) -> torch.optim.Optimizer:
    options = {"lr": 0.01, "weight_decay": 0.1}
    rules = GroupRules(no_decay=["bias"], rules={"head": {"match": "3.*", "lr_scale": 3}})
    return torch.optim.AdamW(parameter_groups(model, options, rules), **options)


def train_by_rule(folder: Path, **options: Any) -> dict[str, Any]:
    """R1 with these groups, each with schedules of its own."""
    drops = multi_step([4, 17], gamma=0.5, unit="updates")
    schedules = [
        Schedule(cosine_restarts(2), warmup=Warmup(updates=3), groups=["rest", "no_decay"]),
        Schedule(drops, groups=["head", "head.no_decay"]),
        Schedule(linear(0.04, 0.4), option="weight_decay"),
        Schedule(linear(end=0.5), option="momentum", interval="epoch"),
    ]
    more = {"optimizer": by_rule, "schedule": schedules, "test": True}
    return r1.train(folder, probe_of(folder), save={"every_updates": 5}, **more, **options)


@pytest.mark.parametrize(
    "at",
    [At("on_forward", 13), At("on_phase_end", 10), At("on_step", 20, phase="test", position=1)],
    ids=["in mid-epoch", "at an epoch's end", "in a test"],
)
def test_res_i_groups_by_rule_with_several_schedules(tmp_path: Path, at: At) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    process.result(train_by_rule, whole)
    first = process.run(train_by_rule, folder, hooks={"at": at})
    assert first.code < 0, first.output
    process.result(train_by_rule, folder)
    assert_eq(whole, folder)
    last = [row for row in equal.rows(folder) if "loss" in row][-1]
    assert last["momentum/head"] == pytest.approx(0.9 - 0.4 * 2 / 3)  # the last epoch of three
    assert last["weight_decay/rest"] == pytest.approx(0.04 + 0.36 * 29 / 30)
    assert last["weight_decay/no_decay"] == 0
    assert last["lr/head"] == pytest.approx(0.03 * 0.25)
