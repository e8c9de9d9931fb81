"""Hook ``timing``: each part's time, by a clock that only the parts move: all sums are exact."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import Data, Phases, Run, Stage, Task, Trainer
from phaseloop.engine import device_kinds
from phaseloop.hooks.metrics_file import MetricsFile
from phaseloop.hooks.timing import Timing
from phaseloop.train_steps import Alternating
from tests.rigs import pairs
from tests.rigs.probes import Break, BreakAt, SkipAt
from tests.rigs.r0 import pair, train
from tests.rigs.ticking import (
    BACKWARD, DATA, FORWARD, LOSS, METER, ON_BACKWARD, ON_FORWARD, ON_STEP, ON_UPDATE, OPTIMIZER,
    PREPARE, STEP, Clock, SlowData, clock, slow_hook, slow_step, slow_task,
)  # fmt: skip

__all__ = ["clock"]  # a fixture


class Kept(Timing):
    """Keeps what it has measured: seconds, by phase and part."""

    def on_end(self, task: Task, outcome: Any) -> None:
        assert self._watch is not None
        self.spent = self._watch.spent
        super().on_end(task, outcome)


def spent(task: Task, **hooks: Any) -> dict[str, dict[str, float]]:
    """Seconds by phase and part, those that took none left out."""
    timing = Kept()
    train(task, timing=timing, **hooks)
    return {
        phase: {part: seconds for part, seconds in own.items() if seconds}
        for phase, own in timing.spent.items()
    }


def of_training(micro_batches: int, updates: int) -> dict[str, float]:
    """What the parts of a training are made of, by the rig's seconds."""
    return {
        "data": micro_batches * DATA,
        "forward": micro_batches * FORWARD,
        "loss": micro_batches * LOSS,
        "meters": micro_batches * METER,
        "backward": micro_batches * BACKWARD,
        "update": updates * OPTIMIZER,
        "step": micro_batches * STEP,
    }


def test_each_part_has_its_own_time_and_no_other(clock: Clock) -> None:
    hook = slow_hook(
        clock, on_forward=ON_FORWARD, on_backward=ON_BACKWARD, on_update=ON_UPDATE, on_step=ON_STEP
    )
    found = spent(slow_task(clock), slow=hook)
    slow = 4 * (ON_FORWARD + ON_BACKWARD + ON_STEP) + 2 * ON_UPDATE
    assert found == {"train": {**of_training(4, 2), "hook/slow": slow}}


def test_the_parts_of_all_phases_add_up_to_the_time_of_the_run(clock: Clock) -> None:
    """From when the trainer looks for the first phase until the last is over."""
    test = Data(SlowData(clock, 3), 1)
    hook = slow_hook(clock, on_start=PREPARE, on_step=ON_STEP, on_phase_start=ON_UPDATE)
    task = slow_task(clock, test=test, phases=Phases(epochs=2))
    found = spent(task, slow=hook)
    assert sum(sum(own.values()) for own in found.values()) == clock.now - PREPARE
    tests = 2 * 3
    assert found["test"] == {
        "data": tests * DATA,
        "forward": tests * FORWARD,
        "loss": tests * LOSS,
        "step": tests * STEP,
        "hook/slow": tests * ON_STEP + 2 * ON_UPDATE,
    }


def test_a_test_within_an_epoch_is_no_part_of_the_training(clock: Clock) -> None:
    test = Data(SlowData(clock, 3), 1)
    phases = Phases(epochs=1, test_every_updates=1, test_every_epochs=None)
    found = spent(slow_task(clock, test=test, phases=phases))
    assert found["train"] == of_training(4, 2)
    assert found["test"]["forward"] == 2 * 3 * FORWARD


def test_what_no_part_does_is_the_rest(clock: Clock) -> None:
    task = slow_task(clock)
    give, task_commit = task.images.give, task.commit

    def commit() -> None:
        clock.tick(PREPARE)
        task_commit()

    task.commit = commit  # type: ignore[method-assign]
    assert give
    assert spent(task)["train"]["rest"] == 4 * PREPARE


def test_an_update_that_the_step_leaves_to_the_engine_is_update(clock: Clock) -> None:
    task = slow_task(clock, train_step=slow_step(clock, update=False))
    assert spent(task)["train"]["update"] == 2 * OPTIMIZER


def test_what_a_hook_calls_is_the_hooks(clock: Clock) -> None:
    hook = slow_hook(clock)

    def on_phase_start(self: Any, task: Task) -> None:
        with torch.no_grad():
            task.forward(torch.ones(1))

    type(hook).on_phase_start = on_phase_start
    found = spent(slow_task(clock), calls=_with(on_phase_start))["train"]
    assert found == {**of_training(4, 2), "hook/calls": FORWARD}


def _with(on_phase_start: Any) -> Any:
    from phaseloop import Hook

    return type("Calls", (Hook,), {"on_phase_start": on_phase_start, "only_watches": True})()
