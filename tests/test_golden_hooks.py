"""The golden list: every call of every hook in order, in a run of two epochs with tests.

Four samples in batches of two make two updates an epoch; micro-batches of one make each update two
steps. A test of one batch comes after update 3, in the middle of epoch 2, and after each epoch.
A second hook listens too, to show that the order of the hooks is kept within each event.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phaseloop import Data, Hook, Phases, Run, Task, Trainer
from phaseloop.engine.events import EVENTS
from phaseloop.hooks.checkpoint import Checkpoint
from tests.rigs.probes import Break
from tests.rigs.r0 import numbers, r0

# What is called, with progress.updates and the phase's name at that moment.
GOLDEN = """
on_start 0 train

on_phase_start 0 train
on_forward 0 train
on_loss_and_meter 0 train
on_backward 0 train
on_step 0 train
on_forward 0 train
on_loss_and_meter 0 train
on_backward 0 train
on_gradients 0 train
on_update 0 train
on_step 1 train
on_forward 1 train
on_loss_and_meter 1 train
on_backward 1 train
on_step 1 train
on_forward 1 train
on_loss_and_meter 1 train
on_backward 1 train
on_gradients 1 train
on_update 1 train
on_step 2 train
on_phase_end 2 train

on_phase_start 2 test
on_forward 2 test
on_loss_and_meter 2 test
on_step 2 test
on_phase_end 2 test

on_phase_start 2 train
on_forward 2 train
on_loss_and_meter 2 train
on_backward 2 train
on_step 2 train
on_forward 2 train
on_loss_and_meter 2 train
on_backward 2 train
on_gradients 2 train
on_update 2 train
on_step 3 train

on_phase_start 3 test
on_forward 3 test
on_loss_and_meter 3 test
on_step 3 test
on_phase_end 3 test

on_forward 3 train
on_loss_and_meter 3 train
on_backward 3 train
on_step 3 train
on_forward 3 train
on_loss_and_meter 3 train
on_backward 3 train
on_gradients 3 train
on_update 3 train
on_step 4 train
on_phase_end 4 train

on_phase_start 4 test
on_forward 4 test
on_loss_and_meter 4 test
on_step 4 test
on_phase_end 4 test

on_loop_end 4 test
on_end 4 test
"""


def spy(calls: list[str], label: str = "", order: int = 50, fail_at: str = "") -> Hook:
    """A hook that listens to everything and writes down each call."""

    def listener(event: str) -> Any:
        def listen(self: Hook, task: Task, *_: Any) -> None:
            call = f"{event} {task.progress.updates} {task.phase.name}"
            calls.append(label + call)
            if call == fail_at:
                raise Break(call)

        return listen

    members = {"order": order, "only_watches": True}
    return type("Spy", (Hook,), {**members, **{event: listener(event) for event in EVENTS}})()


def golden_task(**options: Any) -> Task:
    return r0(
        [1, 2, 3, 4],
        2,
        data={"micro_batch_size": 1},
        test=Data(numbers([1]), 1),
        phases=Phases(epochs=2, test_every_updates=3),
        **options,
    )


def expected() -> list[str]:
    return [line for line in GOLDEN.splitlines() if line]


def test_every_call_in_order() -> None:
    calls: list[str] = []
    Trainer(golden_task(), {"spy": spy(calls)}).train()
    assert calls == expected()


def test_hooks_are_called_by_their_order_within_each_event() -> None:
    calls: list[str] = []
    hooks = {
        "third": spy(calls, "3 ", order=60),
        "first": spy(calls, "1 ", order=10),
        "second": spy(calls, "2 ", order=10),  # of equal order: as in the mapping
    }
    Trainer(golden_task(), hooks).train()
    assert calls == [f"{n} {line}" for line in expected() for n in (1, 2, 3)]


@pytest.mark.parametrize(
    "at",
    ["on_gradients 1 train", "on_step 3 train", "on_loss_and_meter 2 test", "on_start 0 train"],
)
def test_an_error_is_followed_by_on_exception_and_on_end_only(at: str) -> None:
    calls: list[str] = []
    task = golden_task()
    with pytest.raises(Break):
        Trainer(task, {"spy": spy(calls, fail_at=at)}).train()
    until = expected().index(at) + 1
    updates, phase = at.split(" ")[1:]
    ends = [f"on_exception {updates} {phase}", f"on_end {updates} {phase}"]
    assert calls == expected()[:until] + ends


def test_a_stop_ends_the_run_at_the_next_border_without_a_phase_end() -> None:
    class Stop(Hook):
        def on_step(self, task: Task) -> None:
            if task.progress.updates == 3:
                task.request_stop("enough")

    calls: list[str] = []
    outcome = Trainer(golden_task(), {"stop": Stop(), "spy": spy(calls)}).train()
    assert (outcome.status, outcome.reason, outcome.updates) == ("stopped", "enough", 3)
    until = expected().index("on_step 3 train") + 1
    assert calls == [*expected()[:until], "on_loop_end 3 train", "on_end 3 train"]


def test_a_resume_begins_where_the_run_was_and_starts_no_phase_twice(tmp_path: Path) -> None:
    run = Run(str(tmp_path))
    save = {"save": Checkpoint(every_updates=1)}
    first: list[str] = []
    at = "on_forward 2 train"
    with pytest.raises(Break):
        Trainer(golden_task(run=run), {"spy": spy(first, fail_at=at), **save}).train()
    second: list[str] = []
    Trainer(golden_task(run=run), {"spy": spy(second), **save}).train()
    # The newest checkpoint is that of the test after update 2: epoch 2 is begun anew.
    rest = expected()[expected().index("on_phase_start 2 train") :]
    assert second == ["on_start 2 train", "on_resume 2 train", *rest]


def test_a_resume_in_mid_epoch_does_not_start_the_phase_again(tmp_path: Path) -> None:
    run = Run(str(tmp_path))
    save = {"save": Checkpoint(every_updates=1)}
    with pytest.raises(Break):
        Trainer(golden_task(run=run), {"spy": spy([], fail_at="on_forward 3 test"), **save}).train()
    second: list[str] = []
    Trainer(golden_task(run=run), {"spy": spy(second), **save}).train()
    # The test was begun and not finished: it is run from its start, the train phase goes on.
    rest = expected()[expected().index("on_phase_start 3 test") :]
    assert second == ["on_start 3 train", "on_resume 3 train", *rest]
