"""Hook ``timing``: each part's time, by a clock that only the parts move: all sums are exact."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phaseloop import Data, Hook, Phases, Run, Stage, Task, Trainer
from phaseloop.engine import device_kinds
from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint.contents import MODEL
from phaseloop.hooks import timing
from phaseloop.hooks.metrics_file import MetricsFile
from phaseloop.hooks.timing import Timing
from phaseloop.train_steps import Alternating
from tests.rigs import equal, pairs, process, r1
from tests.rigs.probes import Break, BreakAt, SkipAt, watch
from tests.rigs.r0 import train
from tests.rigs.ticking import (
    BACKWARD,
    DATA,
    FORWARD,
    LOSS,
    METER,
    ON_BACKWARD,
    ON_FORWARD,
    ON_STEP,
    ON_UPDATE,
    OPTIMIZER,
    PREPARE,
    STEP,
    Clock,
    SlowData,
    SlowModel,
    SlowSGD,
    clock,
    slow_hook,
    slow_step,
    slow_task,
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
    hook = Kept()
    train(task, timing=hook, **hooks)
    return {
        phase: {part: seconds for part, seconds in own.items() if seconds}
        for phase, own in hook.spent.items()
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
    commit = task.commit

    def slow_commit() -> None:
        clock.tick(PREPARE)
        commit()

    task.commit = slow_commit  # type: ignore[method-assign]
    assert spent(task)["train"] == {**of_training(4, 2), "rest": 4 * PREPARE}


def test_an_update_that_the_step_leaves_to_the_engine_is_update(clock: Clock) -> None:
    task = slow_task(clock, train_step=slow_step(clock, update=False))
    assert spent(task)["train"]["update"] == 2 * OPTIMIZER


class Calls(Hook):
    """Goes through the model at the start of each phase."""

    def on_phase_start(self, task: Task) -> None:
        with torch.no_grad():
            task.forward(torch.ones(1))


def test_what_a_hook_calls_is_the_hooks(clock: Clock) -> None:
    found = spent(slow_task(clock), calls=Calls(), slow=slow_hook(clock, on_forward=ON_FORWARD))
    assert found["train"] == {
        **of_training(4, 2),
        "hook/calls": FORWARD + ON_FORWARD,
        "hook/slow": 4 * ON_FORWARD,
    }


def test_a_closure_is_told_apart_from_the_update_that_calls_it(clock: Clock) -> None:
    """The optimizer calls it once more than the engine, which has called it first."""
    model = SlowModel(clock)

    class Twice(SlowSGD):
        def step(self, closure: Any = None) -> Any:
            closure()  # what is known already
            closure()
            return super().step()

    optimizer: Any = Twice(model.parameters(), lr=1.0)
    optimizer.clock = clock
    train_data = Data(SlowData(clock, 4), 2, shuffle=False)
    task = slow_task(
        clock, model=model, optimizer=optimizer, train=train_data, train_step="closure"
    )
    assert spent(task)["train"] == {
        "data": 2 * DATA,
        "forward": 4 * FORWARD,
        "loss": 4 * LOSS,
        "meters": 2 * METER,
        "backward": 4 * BACKWARD,
        "update": 2 * OPTIMIZER,
    }


def test_a_step_that_takes_the_window_and_several_optimizers(clock: Clock) -> None:
    """Two micro-batches a window, through which each of two optimizers goes; a hook at each."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = SlowModel(clock), SlowModel(clock)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    class Criterion:
        def a(self, model: nn.Module, batch: Any) -> Tensor:
            clock.tick(LOSS)  # called by task.compute, as the model is within it
            return model(batch.input).mean()

        b = a

    model = Model()
    optimizers: Any = {n: SlowSGD(getattr(model, n).parameters(), 1.0) for n in ("a", "b")}
    for one in optimizers.values():
        one.clock = clock
    task = slow_task(
        clock,
        model=model,
        optimizer=optimizers,
        criterion=Criterion(),
        train_step=Alternating(["a", "b"]),
    )
    found = spent(task, slow=slow_hook(clock, on_update=ON_UPDATE))["train"]
    assert found == {
        "data": 4 * DATA,
        "forward": 4 * 2 * (2 * FORWARD + LOSS),  # micro-batches, optimizers, models
        "backward": 4 * 2 * BACKWARD,  # the other's parameters sleep
        "update": 2 * 2 * OPTIMIZER,
        "hook/slow": 2 * 2 * ON_UPDATE,
    }


def test_stages_have_times_of_their_own(clock: Clock) -> None:
    """The second has a step of its own, and one epoch as the first."""
    other = slow_step(clock)

    def step(task: Task) -> None:
        clock.tick(PREPARE)
        other(task)

    stages = [Stage(name="warm", epochs=1), Stage(name="main", epochs=1, train_step=step)]
    found = spent(slow_task(clock, phases=stages))
    assert found["warm/train"] == of_training(4, 2)
    assert found["main/train"]["step"] == 4 * (STEP + PREPARE)


# --- what is logged ---


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row.get("event", "time") == "time"]


def times(row: dict[str, Any]) -> dict[str, float]:
    return {k.removeprefix("time/"): v for k, v in row.items() if k.startswith("time/")}


def logged(
    folder: Path, clock: Clock, log_every: int = 1, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of log points, and those of ends of phases."""
    hooks = options.pop("hooks", {})
    task = slow_task(clock, run=Run(str(folder), log_every=log_every), **options)
    train(task, timing=Timing(), rows=MetricsFile(), **hooks)
    found = rows(folder)
    return [r for r in found if "loss" in r], [r for r in found if r.get("event") == "time"]


def whole(micro_batches: int, updates: int) -> float:
    return sum(of_training(micro_batches, updates).values())


def test_shares_at_log_points_are_those_since_the_last_one(tmp_path: Path, clock: Clock) -> None:
    """A hook that takes long in the second window only; the row at update 2 has both since 0."""
    slow = slow_hook(clock, on_update=ON_UPDATE)
    points, _ = logged(tmp_path, clock, 2, samples=8, hooks={"slow": slow})
    assert [row["update"] for row in points] == [2, 4]
    total = whole(4, 2) + 2 * ON_UPDATE
    for row in points:
        found = times(row)
        assert found.pop("ms") == pytest.approx(1000 * total / 2)
        assert sum(found.values()) == pytest.approx(1, abs=1e-5)
        expected = {**of_training(4, 2), "hook/slow": 2 * ON_UPDATE}
        seen = {part: share for part, share in found.items() if share}
        assert seen == {part: round(s / total, 6) for part, s in expected.items()}


def test_a_window_that_is_skipped_counts_to_the_next_update(tmp_path: Path, clock: Clock) -> None:
    points, _ = logged(tmp_path, clock, samples=6, hooks={"skip": SkipAt(2)})
    per_window = whole(2, 1)
    assert [times(row)["ms"] for row in points] == [
        pytest.approx(1000 * per_window),
        pytest.approx(1000 * (2 * per_window - OPTIMIZER)),
    ]


def test_a_line_for_each_phase(tmp_path: Path, clock: Clock) -> None:
    test = Data(SlowData(clock, 3), 1)
    _, ends = logged(tmp_path, clock, 9, test=test, phases=Phases(epochs=2))
    assert [(row["phase"], row["update"]) for row in ends] == [
        ("train", 2), ("test", 2), ("train", 4), ("test", 4),
    ]  # fmt: skip
    in_test = 3 * (DATA + FORWARD + LOSS + STEP)
    for row in ends:
        assert row["seconds"] == (whole(4, 2) if row["phase"] == "train" else in_test)
        found = times(row)
        assert sum(found.values()) == pytest.approx(1, abs=1e-5)
    assert times(ends[1])["forward"] == round(3 * FORWARD / in_test, 6)


def test_the_table_at_the_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    test = Data(SlowData(clock, 3), 1)
    with caplog.at_level(logging.INFO, "phaseloop"):
        train(slow_task(clock, test=test), timing=Timing())
    lines = [record.getMessage() for record in caplog.records]
    first = next(n for n, line in enumerate(lines) if line.startswith("time by part"))
    total, in_test = whole(4, 2), 3 * (DATA + FORWARD + LOSS + STEP)
    cells = {line.split()[0]: line.split()[1:] for line in lines[first:]}
    assert lines[first].split() == ["time", "by", "part", "train", "test"]
    assert cells["forward"] == [
        f"{4 * FORWARD:.3f}", "s", f"{400 * FORWARD / total:.1f}", "%",
        f"{3 * FORWARD:.3f}", "s", f"{300 * FORWARD / in_test:.1f}", "%",
    ]  # fmt: skip
    assert cells["backward"] == [
        f"{4 * BACKWARD:.3f}", "s", f"{400 * BACKWARD / total:.1f}", "%",
    ]  # fmt: skip
    assert cells["per"] == ["update", f"{1000 * total / 2:.2f}", "ms"]


# --- a run that ends otherwise, and what is left behind ---


def is_as_before(task: Task) -> bool:
    """Nothing of the wrapping is left."""
    names = {"forward", "compute", "criterion", "measure", "backward", "update", "advance_phase"}
    return not names & set(vars(task)) and task.train_step is task.stages.steps[0][0]


def test_all_is_put_back_also_after_an_error(clock: Clock) -> None:
    for hooks in ({}, {"stop": BreakAt(1)}):
        task, hook = slow_task(clock), Kept()
        trainer = Trainer(task, {"timing": hook, "slow": slow_hook(clock, on_step=1.0), **hooks})
        if hooks:
            with pytest.raises(Break):
                trainer.train()
            assert hook.spent["train"]["update"] == OPTIMIZER
        else:
            trainer.train()
        assert is_as_before(task)
        listener = trainer.hooks.on_phase_end
        assert listener == hook.on_phase_end


def test_without_it_nothing_is_wrapped(clock: Clock) -> None:
    task = slow_task(clock)
    seen = watch("on_step", is_as_before)
    train(task, seen=seen)
    assert seen.seen == [True] * 4
    task, seen = slow_task(clock), watch("on_step", is_as_before)
    train(task, seen=seen, timing=Timing())
    assert not any(seen.seen)


def test_a_resume_begins_anew_and_trains_the_same(tmp_path: Path) -> None:
    """R1 is stopped in the second epoch; with the hook and without, the same comes out."""
    plain = equal.reference()
    folder = tmp_path / "run"
    ended = process.run(
        r1.train, folder, equal.probe_of(folder), hooks={"timing": Timing(), "b": BreakAt(13)},
        save={"every_updates": 1},
    )  # fmt: skip
    assert ended.code == 1
    result = process.result(r1.train, folder, equal.probe_of(folder), hooks={"timing": Timing()})
    assert result["updates"] == 30
    a, b = equal.newest(plain), equal.newest(folder)
    assert not list(equal.differ("model", store.load(a, MODEL), store.load(b, MODEL)))
    assert "time/data" not in str(equal.state_of(b)["recorder"])
    found = [row for row in rows(folder) if "loss" in row]
    assert [row["update"] for row in found] == list(range(1, 31))
    for row in found:
        shares = times(row)
        assert shares.pop("ms") > 0
        assert sum(shares.values()) == pytest.approx(1, abs=2e-5)


def test_on_a_device_that_is_not_the_host_it_says_so_or_waits(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that the host hands its work to: what it has been given takes until it is waited
    for. So with sync a forward takes its time, and without it takes none."""

    class Device(device_kinds.Kind):
        def __init__(self) -> None:
            self.asked = 0.0

        def wait(self, device: torch.device) -> None:
            clock.tick(self.asked)
            self.asked = 0.0

    device = Device()
    monkeypatch.setattr(timing, "kind_of", lambda _: device)

    class Model(SlowModel):
        def forward(self, x: Tensor) -> Tensor:
            device.asked += FORWARD
            return self.w * x

    for sync, expected in ((False, None), (True, 4 * FORWARD)):
        hook = Kept(sync)
        model = Model(clock)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        train(slow_task(clock, model=model, optimizer=optimizer), timing=hook)
        assert (hook.spent["train"].get("forward") or None) == expected


# --- several processes ---


def two_ranks(folder: Path) -> list[dict[str, Any]]:
    task = r1.make_task(folder, epochs=1, backend=pairs.ddp())
    pairs.train(task, **r1.make_hooks(timing=Timing()))
    return rows(folder) if task.primary else []


def test_with_several_processes_the_primary_logs_its_own(tmp_path: Path) -> None:
    ((found, nothing),) = pairs.results([(two_ranks, {"folder": tmp_path / "run"})])
    assert nothing == []
    points = [row for row in found if "loss" in row]
    assert [row["update"] for row in points] == list(range(1, 11))
    for row in points:
        shares = times(row)
        assert shares.pop("ms") > 0
        assert shares["processes"] > 0
        assert sum(shares.values()) == pytest.approx(1, abs=2e-5)
    assert sum(row.get("event") == "time" for row in found) == 1
