"""Parts: who watches is told, in pairs and in order, and the task is as before when nobody does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phaseloop import Hook, Phases, Task, Trainer
from phaseloop.engine.stopwatch import Stopwatch
from tests.rigs.r0 import r0, train


class Noting(Hook):
    """Watches between two updates, and notes what it is told.

    Args:
        first, last: the updates after which it begins and ends; 0: at the start.
    """

    only_watches = True

    def __init__(self, first: int = 0, last: int = 99) -> None:
        self.first, self.last = first, last
        self.told: list[str] = []

    def on_start(self, task: Task) -> None:
        if self.first == 0:
            task.parts.watch(self)

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.first:
            task.parts.watch(self)
        elif task.progress.updates == self.last:
            task.parts.unwatch(self)

    def on_end(self, task: Task, outcome: Any) -> None:
        task.parts.unwatch(self)

    def enter(self, part: str) -> None:
        self.told.append(f"+{part}")

    def leave(self, part: str) -> None:
        self.told.append(f"-{part}")

    def between(self) -> None:
        self.told.append("between")

    def phase(self, name: str) -> None:
        self.told.append(name)


STEP = [
    "+data", "-data", "+step", "+forward", "-forward", "+loss", "+meters", "-meters", "-loss",
    "+backward", "-backward", "+update", "-update", "-step",
]  # fmt: skip


def test_parts_come_in_order_one_within_the_other() -> None:
    hook = Noting()
    train(r0(range(1), 1), note=hook)
    note = ["+hook/note", "-hook/note"]
    assert hook.told == ["between", "train", *STEP, *note, "between"]


def test_two_watch_each_for_its_time() -> None:
    """The second between the ends of updates 1 and 2; what is open then is left too."""
    one, two = Noting(), Noting(1, 2)
    train(r0(range(3), 1), one=one, two=two)
    hooks = ["+hook/one", "-hook/one", "+hook/two", "-hook/two"]
    assert one.told == ["between", "train", *3 * (STEP + hooks), "between"]
    begins = one.told.index("-hook/two") + 1
    assert two.told == one.told[begins:][: len(STEP + hooks)]


def test_a_wrapper_of_somebody_else_stays() -> None:
    """One that was there before, and one that came after."""
    task = r0(range(2), 1)
    calls: list[str] = []
    forward, backward = task.forward, None

    def my_forward(*args: Any) -> Any:
        calls.append("forward")
        return forward(*args)

    def my_backward(*args: Any) -> None:
        calls.append("backward")
        assert backward is not None
        backward(*args)

    task.forward = my_forward  # type: ignore[method-assign]
    hook = Noting(0, 1)

    class After(Hook):
        only_watches = True

        def on_phase_start(self, task: Task) -> None:
            nonlocal backward
            backward = task.backward
            task.backward = my_backward  # type: ignore[method-assign]

    train(task, note=hook, after=After())
    assert calls == ["forward", "backward"] * 2
    assert task.forward is my_forward and task.backward is my_backward
    assert "update" not in vars(task)


def test_an_error_leaves_every_part_that_it_came_through() -> None:
    def criterion(output: Any, target: Any) -> Any:
        raise ValueError("mine")

    hook = Noting()
    with pytest.raises(ValueError, match="mine"):
        train(r0(range(1), 1, criterion=criterion), note=hook)
    assert hook.told[-3:] == ["+loss", "-loss", "-step"]


def test_the_training_is_the_same() -> None:
    runs = [r0(range(1, 9), 3, phases=Phases(epochs=2)) for _ in range(2)]
    Trainer(runs[0], {}).train()
    train(runs[1], note=Noting(1, 4))
    assert torch.equal(runs[0].bare_model.w, runs[1].bare_model.w)


def test_a_part_that_began_before_the_stopwatch_is_no_part_of_it() -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    watch = Stopwatch(lambda: next(now))
    watch.phase("train")
    watch.leave("hook/earlier")
    watch.enter("data")
    watch.leave("data")
    assert watch.spent == {"train": {"rest": 7.0, "data": 8.0}}
