"""The plan's picture of the schedules: what every stage of a run will use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Data, Phases, Run, Schedule, Stage, Task
from phaseloop.engine.schedules import constant, cosine, linear
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.tools import plan
from phaseloop.tools.run import run
from tests.rigs import cli, ranks
from tests.rigs.probes import RecordingSGD
from tests.rigs.r0 import numbers, r0, train


def make(folder: Path, *stages: Any) -> tuple[Task, RecordingSGD]:
    """10 samples in batches of 2: 5 updates an epoch."""
    made: list[RecordingSGD] = []

    def optimizer(parameters: Any, lr: float) -> RecordingSGD:
        made.append(RecordingSGD(parameters, lr=lr))
        return made[0]

    options = {"optimizer": optimizer, "schedule": Schedule(cosine()), "run": Run(str(folder))}
    return r0(range(10), 2, phases=list(stages), **options), made[0]


STAGES = (
    Stage(name="a", updates=7),
    Stage(name="b", epochs=1, repeat=2, schedule=Schedule(linear(), interval="epoch")),
    Stage(name="c", epochs=2, train=Data(numbers(range(6)), 2), schedule=Schedule(linear())),
)
UPDATES = 7 + 2 * 5 + 2 * 3


@pytest.mark.parametrize("stages", [STAGES, STAGES[:1]], ids=["several", "one"])
def test_what_is_drawn_is_what_the_training_uses(tmp_path: Path, stages: Any) -> None:
    task, optimizer = make(tmp_path / "run", *stages)
    train(task, learning_rate=LearningRate())
    planned, _ = make(tmp_path / "plan", *stages)
    planned.build()
    curves = plan._follow(planned, planned.stages.plans())
    updates, rates = curves.lines["optimizer", "lr", 0]
    assert len(optimizer.rates) == (UPDATES if len(stages) > 1 else 7)
    assert updates == list(range(1, len(optimizer.rates) + 1))
    assert [[rate] for rate in rates] == optimizer.rates
    assert curves.borders == ([7, 12, 17] if len(stages) > 1 else [])


def test_a_stage_that_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    stages = (
        Stage(name="a", time="1m", schedule=Schedule(constant())),
        Stage(name="b", updates=3),
    )
    task, _ = make(tmp_path / "run", *stages)
    task.build()
    lines = list(plan._schedule_lines(task))
    assert "schedules   not drawn for a, whose length is a time" in lines
    assert lines[-1] == f"schedules   {tmp_path / 'run' / 'plan.png'}"
    assert (tmp_path / "run" / "plan.png").stat().st_size > 0


def test_nothing_is_drawn_where_the_only_length_is_a_time(tmp_path: Path) -> None:
    task, _ = make(tmp_path, Stage(time="1m", schedule=Schedule(constant())))
    task.build()
    assert list(plan._schedule_lines(task)) == []


def test_one_length_of_all_is_drawn_whole(tmp_path: Path) -> None:
    """Of many updates, some: the first and the last always."""
    task = r0(range(1000), 1, phases=Phases(epochs=1), schedule=Schedule(linear()))
    task.build()
    updates, rates = plan._follow(task, task.stages.plans()).lines["optimizer", "lr", 0]
    assert updates[0] == 1 and updates[-1] == 1000 and len(updates) == plan._POINTS + 1
    assert rates == [1 - (k - 1) / 1000 for k in updates]


def plan_tiny(folder: Path) -> int:
    os.chdir(folder)
    return run(["config=tiny", "plan=true", "schedule=cosine"])


def test_of_several_processes_the_primary_prints_and_draws(tmp_path: Path) -> None:
    first, second = ranks.run(plan_tiny, cli.folder(tmp_path))
    assert (first.value, second.value) == (0, 0), first.output + second.output
    assert "training " in first.output
    assert second.output == ""
