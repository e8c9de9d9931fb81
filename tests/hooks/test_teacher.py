"""Hook ``teacher``: by its formula, from a copy, once for each update that counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import ConfigError, Data, Phases, Stage, Task, Trainer
from phaseloop.hooks.teacher import Teacher
from tests.rigs.probes import SkipAt, watch
from tests.rigs.r0 import mean_output, numbers, train


class Followed(nn.Module):
    """w * x, and a teacher whose w and count follow."""

    def __init__(self, w: float = 2.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))
        self.register_buffer("count", torch.tensor(5.0))
        self.teacher = nn.Module()
        self.teacher.w = nn.Parameter(torch.tensor(100.0), requires_grad=False)
        self.teacher.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def task_of(model: nn.Module | None = None, xs: Any = (1, 2, 3, 4), **options: Any) -> Task:
    """Rate 1: w is 2, then 1, -1, -4, -8."""
    model = model or Followed()
    settings: dict[str, Any] = {
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        "criterion": mean_output,
        "train": Data(numbers(xs), 1, shuffle=False),
        "phases": Phases(epochs=1),
    }
    return Task(model=model, **{**settings, **options})


def teacher_of(task: Task) -> Tensor:
    return task.bare_model.teacher.w


def seen_by(task: Task, **hooks: Any) -> list[float]:
    """The teacher's weight after each step."""
    seen = watch("on_step", lambda t: float(teacher_of(t)))
    train(task, **hooks, seen=seen)
    return list(seen.seen)


def test_a_constant_momentum_by_its_formula() -> None:
    # It starts as a copy: 2. With m = .75: 2 + (1 - 2) / 4, and so on.
    expected, now = [], 2.0
    for w in (1.0, -1.0, -4.0, -8.0):
        now = 0.75 * now + 0.25 * w
        expected.append(now)
    task = task_of()
    assert seen_by(task, teacher=Teacher(momentum=0.75, schedule="constant")) == expected
    assert task.bare_model.teacher.count == 5  # copied at the start


def test_a_cosine_rises_from_the_momentum_at_the_first_update() -> None:
    expected, now = [], 2.0
    for k, w in enumerate((1.0, -1.0, -4.0, -8.0)):  # where is k / 4: before the update
        m = 1 - (1 - 0.5) * (math.cos(math.pi * k / 4) + 1) / 2
        now = m * now + (1 - m) * w
        expected.append(now)
    assert expected[0] == 1.5  # the first moves it by 1 - momentum
    found = seen_by(task_of(), teacher=Teacher(momentum=0.5))
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_cosine_begins_anew_in_each_stage() -> None:
    """Of one update each: both move it by 1 - momentum, w being 1 and then 0."""
    stages = [Stage(name="a", updates=1), Stage(name="b", updates=1)]
    found = seen_by(task_of(xs=[1], phases=stages), teacher=Teacher(momentum=0.5))
    assert found == [1.5, 0.75]


def test_a_skipped_update_moves_nothing() -> None:
    found = seen_by(task_of(), skip=SkipAt(2), teacher=Teacher(momentum=0.5, schedule="constant"))
    # w is 1, then 1 again, then -2, -6.
    assert found == [1.5, 1.5, -0.25, -3.125]


def test_a_batch_of_several_pieces_moves_it_once() -> None:
    task = task_of(train=Data(numbers([1, 3]), 2, micro_batch_size=1, shuffle=False))
    # w is 2 - 2 = 0 after the only update.
    assert seen_by(task, teacher=Teacher(momentum=0.5, schedule="constant")) == [2.0, 1.0]


def test_of_a_run_whose_length_is_a_time_cosine_is_refused() -> None:
    task = task_of(phases=Phases(time="1h"))
    with pytest.raises(ConfigError, match=r"hooks\.teacher\.schedule: cosine rises over the"):
        train(task, teacher=Teacher())


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (Teacher(momentum=1.1), r"hooks\.teacher\.momentum: 1\.1 is not from 0 to 1"),
        (Teacher(schedule="linear"), r"hooks\.teacher\.schedule: 'linear' is not one of cosine"),
        (Teacher(module="w"), r"hooks\.teacher\.module: Followed has no module 'w'; it has teach"),
    ],
)
def test_wrong_options_are_named(hook: Teacher, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Trainer(task_of(), hooks={"teacher": hook}).train()


def test_a_teacher_that_has_nothing_to_follow_is_refused() -> None:
    model = Followed()
    model.teacher.extra = nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(ConfigError, match=r"teacher\.extra has nothing to follow: the mo"):
        train(task_of(model), teacher=Teacher())


class Asks(Followed):
    """Its teacher takes part in the output, with a gradient where nobody freezes it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher.w.requires_grad_(True)
        self.teacher.norm = nn.BatchNorm1d(1, affine=False)
        self.norm = nn.BatchNorm1d(1, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.norm(torch.stack([x, x]).reshape(-1, 1))
        return (self.w + self.teacher.w) * x


DECAYED = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)}


@pytest.mark.parametrize("options", [{}, DECAYED], ids=["plain", "decayed"])
@pytest.mark.parametrize("freeze", [[], ["teacher"]], ids=["never", "first"])
def test_it_is_trained_in_no_stage(freeze: list[str], options: dict[str, Any]) -> None:
    """Frozen in the first stage, or by nobody: the optimizer does not move it in either."""
    stages = [Stage(name="a", epochs=1, freeze=freeze), Stage(name="b", epochs=1)]
    task = task_of(Asks(), phases=stages, **options)
    still = seen_by(task, teacher=Teacher(momentum=1.0, schedule="constant"))
    assert still == [2.0] * 8
    assert task.bare_model.w != 2.0
    # Its batch norm is not: it has seen four batches of each stage, which a frozen stage stops.
    seen = int(task.bare_model.teacher.norm.num_batches_tracked)
    assert seen == (4 if freeze else 8)


def test_a_model_that_is_a_teacher_alone_is_refused() -> None:
    model = Followed()
    model.w.requires_grad_(False)
    model.teacher.w.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"hooks\.teacher\.module: .* all that the optimizer"):
        train(task_of(model), teacher=Teacher())
