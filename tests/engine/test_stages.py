"""Stages, lengths and cadences of every kind, the early end of a phase; each with its resume."""

from __future__ import annotations

import itertools
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop import ConfigError, Data, Hook, Phases, Schedule, Stage, Task, Warmup
from phaseloop.engine import durations
from phaseloop.engine.schedules import cosine
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.train_steps import standard_train_step
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, probe_of, undisturbed
from tests.rigs.probes import watch
from tests.rigs.r0 import numbers, r0, train, weight
from tests.rigs.r1 import At


def run_and_note(task: Task, **hooks: Any) -> list[tuple[int, int]]:
    """Epoch and update of every test of a run."""
    ends = watch("on_phase_end", lambda t: None if t.train else (t.phase.epoch, t.progress.updates))
    train(task, ends=ends, **hooks)
    return [at for at in ends.seen if at is not None]


def task_of(phases: Any, samples: int = 10, tests: bool = True, **options: Any) -> Task:
    """R0 with batches of one sample, and a test set."""
    test = Data(numbers([1]), 1) if tests else None
    return r0(range(samples), 1, phases=phases, test=test, lr=1e-3, **options)


# --- lengths ---


@pytest.mark.parametrize(
    ("phases", "updates"),
    [
        (Phases(epochs=0.5), 5),
        (Phases(epochs=2.3), 23),
        (Phases(epochs=0.01), 1),  # a fraction of a batch is a batch
        (Phases(epochs=2.5, updates=24), 24),
        (Phases(epochs=2.5, updates=26), 25),
    ],
)
def test_an_epoch_may_be_a_fraction(phases: Phases, updates: int) -> None:
    task = task_of(phases)
    assert train(task).updates == updates
    assert task.where == 1


def test_a_longer_run_goes_on_with_the_rest_of_a_fraction(tmp_path: Path) -> None:
    """1.5 epochs and then 3 are 3 epochs."""
    folder = tmp_path / "run"
    constant = {"schedule": r1.Plan("constant")}
    process.result(r1.train, folder, probe_of(folder), epochs=1.5, **constant)
    process.result(r1.train, folder, probe_of(folder), epochs=3, **constant)
    ids = [i for line in r1.lines(probe_of(folder), "update") for i in line["ids"]]
    whole = undisturbed(epochs=3, **constant)
    assert ids == [i for line in r1.lines(probe_of(whole), "update") for i in line["ids"]]


def test_a_time_ends_the_training_and_counts_over_interruptions(monkeypatch: Any) -> None:
    """A clock that goes one second at each update: 90 s are 90 updates, wherever they are made."""
    clock = iter(range(10**6))
    monkeypatch.setattr("phaseloop.engine.committing.time.monotonic", lambda: float(next(clock)))
    task = task_of(Phases(time="1m 30s"), tests=False)
    assert train(task).updates == pytest.approx(
        90, abs=10
    )  # the clock goes at an epoch's start too
    assert 90 <= task.progress.seconds < 92


def test_a_time_alone_gives_no_schedule_a_length() -> None:
    with pytest.raises(ConfigError, match="schedule: it is spread over the planned updates"):
        train(task_of(Phases(time="1h"), schedule=Schedule(cosine())))


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("1h 30m", 5400), ("2d", 172800), ("0.5m", 30)]
)
def test_durations(text: str, expected: float) -> None:
    assert durations.seconds(text, "phases.time") == expected


@pytest.mark.parametrize("text", ["90", "", "1 hour", "h", "1h x", "0s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match=r"phases\.time: "):
        durations.seconds(text, "phases.time")


# --- cadences ---


@pytest.mark.parametrize(
    ("every", "updates"),
    [
        (0.25, [3, 5, 8, 10, 13, 15, 18, 20]),  # ceil(2.5 k): the first window that reaches it
        (0.5, [5, 10, 15, 20]),
        (0.1, list(range(1, 21))),
        (1.5, [15, 20]),
        (2, [20]),
    ],
)
def test_tests_at_parts_of_an_epoch(every: float, updates: list[int]) -> None:
    task = task_of(Phases(epochs=2, test_every_epochs=every))
    assert [update for _, update in run_and_note(task)] == updates
    if every < 1:
        ends = [math.ceil(k * every * 10 - 1e-9) for k in range(1, round(2 / every) + 1)]
        assert updates == ends


def test_a_border_at_a_skipped_window_is_tested_all_the_same() -> None:
    """Half an epoch is at window 5, which is skipped."""
    skip = watch("on_gradients", lambda t: t.progress.windows == 4 and t.skip_update("x"), order=50)
    updates = [u for _, u in run_and_note(task_of(Phases(epochs=1, test_every_epochs=0.5)), s=skip)]
    assert updates == [4, 9]


def test_tests_by_time(monkeypatch: Any) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr("phaseloop.engine.committing.time.monotonic", lambda: float(next(clock)))
    updates = [
        update for _, update in run_and_note(task_of(Phases(
            epochs=1, test_every_epochs=None, test_every_time="4s")))
    ]  # fmt: skip
    assert updates[0] in (3, 4)
    assert updates[-1] == 10
    assert all(b - a <= 4 for a, b in itertools.pairwise(updates))


@pytest.mark.parametrize("step", ["standard", None])
def test_a_test_at_the_start_disturbs_nothing(step: str | None) -> None:
    def drawing(task: Task) -> None:
        torch.rand(3)
        standard_train_step(task)

    chosen = step or drawing
    plain = r1.make_task(None, test=True, train_step=chosen)
    first = r1.make_task(None, test=True, train_step=chosen, phases={"test_at_start": True})
    losses = [watch("on_step", lambda t: float(t.loss) if t.train else None) for _ in range(2)]
    train(plain, losses=losses[0])
    assert (run_and_note(first, losses=losses[1]))[0] == (0, 0)
    assert [x for x in losses[0].seen if x is not None] == [
        x for x in losses[1].seen if x is not None
    ]


# --- the early end of a phase ---


def end_at(update: int) -> Any:
    def ask(task: Task) -> None:
        if task.train and task.progress.updates == update and task.updated:
            task.end_phase("asked for by the test")

    return watch("on_step", ask, order=50)


def test_an_epoch_may_be_ended_early() -> None:
    """Epoch 1 of 3 ends after update 4, with its test; 10 updates follow in each."""
    task = task_of(Phases(epochs=3))
    ends = watch("on_phase_end", lambda t: (t.phase.name, t.progress.updates))
    outcome = train(task, end=end_at(4), ends=ends)
    assert outcome.updates == 24
    assert ends.seen == [(n, u) for u in (4, 14, 24) for n in ("train", "test")]


def test_a_test_may_be_ended_early() -> None:
    def ask(task: Task) -> None:
        if not task.train and task.phase.position == 2:
            task.end_phase("enough")

    task = r0([1], 1, epochs=2, test=Data(numbers(range(5)), 1))
    ends = watch("on_phase_end", lambda t: (t.phase.name, t.phase.position))
    train(task, ask=watch("on_step", ask, order=50), ends=ends)
    assert ends.seen == [("train", 1), ("test", 2)] * 2


def end_the_second_epoch(task: Task) -> None:
    """A step that ends its epoch: what it asks for is in the checkpoint of that very update."""
    standard_train_step(task)
    if task.train and task.progress.updates == 13:
        task.end_phase("asked for by the test")


@pytest.mark.parametrize("at", [At("on_step", 14), At("on_phase_end", 14), At("on_step", 17)])
def test_an_early_end_is_resumed(tmp_path: Path, at: At) -> None:
    options: dict[str, Any] = {
        "train_step": end_the_second_epoch,
        "save": {"every_updates": 1},
        "test": True,
    }
    whole = undisturbed(**options)
    numbers = [line["update"] for line in r1.lines(probe_of(whole), "update")]
    assert numbers == list(range(1, 25))  # 10, 4 and 10
    folder = tmp_path / "run"
    killed = process.run(r1.train, folder, probe_of(folder), hooks={"at": at}, **options)
    assert killed.code == -signal.SIGKILL, killed.output
    process.result(r1.train, folder, probe_of(folder), **options)
    assert_eq(whole, folder)


# --- stages ---


def doubled(task: Task) -> None:
    """A step whose loss counts twice."""
    batch = task.next_batch()
    loss = 2 * task.criterion(task.forward(batch.input), batch.target)
    if task.train:
        task.backward(loss)
        task.update()


def test_stages_one_after_the_other_each_with_its_own() -> None:
    """R0, learning rate 1: stage a moves w by 1 at each of 3 updates; b, twice, by 2 * 10."""
    stages = [
        Stage(name="a", epochs=1, test_every_epochs=None),
        Stage(name="b", repeat=2, updates=1, train=Data(numbers([10, 10]), 1), train_step=doubled),
    ]
    task = r0([1, 1, 1], 1, phases=stages, test=Data(numbers([1]), 1))
    seen = watch("on_phase_end", lambda t: (t.stages.label(t.progress.stage), t.phase.name))
    assert train(task, seen=seen).updates == 5
    assert weight(task) == -(3 * 1 + 2 * 20)
    assert seen.seen == [
        ("a", "train"), ("b 1/2", "train"), ("b 1/2", "test"), ("b 2/2", "train"), ("b 2/2", "test")
    ]  # fmt: skip


def noted(task: Task) -> None:
    """A step that only measures."""
    batch = task.next_batch()
    task.measure(None, task.forward(batch.input), batch.target)


def test_a_stage_without_updates_tests_at_its_start_by_its_own_step() -> None:
    """Also where the stage before it has tested at the same update, by another step."""
    seen: list[int] = []

    def look(task: Task) -> None:
        seen.append(task.progress.updates)
        noted(task)

    stages = [
        Stage(name="before", updates=0, test_at_start=True, train_step=look),
        Stage(name="a", epochs=1),
        Stage(name="look", updates=0, test_at_start=True, train_step=look),
        Stage(name="again", updates=0, test_at_start=True),
        Stage(name="none", updates=0),
        Stage(name="b", epochs=1),
        Stage(name="last", epochs=0, test_at_start=True, train_step=look),
    ]
    task = r0([1, 1, 1], 1, phases=stages, test=Data(numbers([1]), 1))
    ends = watch("on_phase_end", lambda t: (t.stages.label(t.progress.stage), t.phase.name))
    assert train(task, ends=ends).updates == 6
    assert seen == [0, 3, 6]
    assert ends.seen == [
        ("before", "test"), ("a", "train"), ("a", "test"), ("look", "test"), ("again", "test"),
        ("b", "train"), ("b", "test"), ("last", "test"),
    ]  # fmt: skip
    assert task.over


def test_a_stage_with_other_test_sets_tests_them_at_its_start() -> None:
    tests = {name: Data(numbers([1]), 1) for name in ("one", "two")}
    stages = [
        Stage(name="a", updates=1, test_sets=["one"]),
        Stage(name="b", updates=0, test_sets=["two"], test_at_start=True),
        Stage(name="c", updates=0, test_sets=["two"], test_at_start=True),  # tested already
        Stage(name="d", updates=0, test_sets=[], test_at_start=True),
    ]
    ends = watch("on_phase_end", lambda t: (t.stages.label(t.progress.stage), t.phase.name))
    train(r0([1], 1, phases=stages, test=tests), ends=ends)
    assert ends.seen == [("a", "train"), ("a", "one"), ("b", "two")]


def test_a_step_hears_of_the_beginning_and_the_end_of_its_phases_before_the_hooks() -> None:
    heard: list[tuple[str, str]] = []

    class Step:
        def __call__(self, task: Task) -> None:
            standard_train_step(task)

        def on_phase_start(self, task: Task) -> None:
            heard.append(("step starts", task.phase.name))

        def on_phase_end(self, task: Task) -> None:
            heard.append(("step ends", task.phase.name))

    class Listener(Hook):
        def on_phase_start(self, task: Task) -> None:
            heard.append(("hook starts", task.phase.name))

        def on_phase_end(self, task: Task) -> None:
            heard.append(("hook ends", task.phase.name))

    phases = Phases(epochs=1, test_every_updates=1)  # a test in the middle of the epoch
    task = r0([1, 1], 1, phases=phases, test=Data(numbers([1]), 1), train_step=Step())
    train(task, listener=Listener())
    test = [("step starts", "test"), ("hook starts", "test")]
    test += [("step ends", "test"), ("hook ends", "test")]
    assert heard == [
        ("step starts", "train"), ("hook starts", "train"), *test,
        ("step ends", "train"), ("hook ends", "train"), *test,
    ]  # fmt: skip


def test_where_and_schedules_begin_anew_in_each_stage() -> None:
    stages = [
        Stage(name="a", epochs=1, schedule=Schedule(cosine())),
        Stage(name="b", epochs=0.5, repeat=2),
        Stage(name="c", updates=2, schedule=Schedule(cosine(start=0.5))),
    ]
    task = task_of(stages, samples=4, tests=False)
    used = watch("on_update", lambda t: (t.where, t.optimizers["optimizer"].param_groups[0]["lr"]))
    train(task, learning_rate=LearningRate(), used=used)

    def half_cosine(base: float, k: int, n: int) -> tuple[float, float]:
        return k / n, base * (1 + math.cos(math.pi * k / n)) / 2

    expected = [half_cosine(1e-3, k, 4) for k in range(4)]
    expected += [(k / 2, 1e-3) for k in range(2)] * 2  # no schedule: the rate as it was given
    expected += [half_cosine(0.5, k, 2) for k in range(2)]
    assert [where for where, _ in used.seen] == [where for where, _ in expected]
    assert [rate for _, rate in used.seen] == pytest.approx([rate for _, rate in expected])


def test_epochs_count_on_so_that_each_has_an_order_of_its_own() -> None:
    stages = [Stage(name="a", epochs=1), Stage(name="b", epochs=1)]
    orders: list[list[int]] = [[], []]
    task = r1.make_task(None, phases=stages)
    note = watch("on_forward", lambda t: orders[t.progress.stage].extend(t.batch.indices.tolist()))
    train(task, note=note)
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1]


def test_a_stage_freezes_for_itself() -> None:
    stages = [Stage(name="head", epochs=1, freeze=["0.*"]), Stage(name="all", epochs=1)]
    task = r1.make_task(None, phases=stages)
    before = task.bare_model[0].weight.detach().clone()
    ends = watch("on_phase_end", lambda t: torch.equal(t.bare_model[0].weight, before))
    train(task, ends=ends)
    assert ends.seen == [True, False]


LONG_WARMUP = Schedule(cosine(), warmup=Warmup(updates=4))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "phases: give Phases, or a list of stages"),
        ([Phases(epochs=1)], r"phases\.0: a Phases was given where a Stage is due"),
        ([Stage(name="a", epochs=1), Stage(name="a", epochs=1)], "a name of its own"),
        ([Stage(name="a", epochs=1, repeat=0), Stage(name="b", epochs=1)], r"phases\.a\.repeat: 0"),
        ([Stage(name="a"), Stage(name="b", epochs=1)], r"phases\.a\.epochs: give a length"),
        ([Stage(name="a", epochs=1, test_sets=["tset"])], "no test set is called 'tset'"),
        ([Stage(name="a", epochs=1, freeze=["x.*"])], r"phases\.a\.freeze: the pattern 'x\.\*'"),
        (
            [Stage(name="a", epochs=1), Stage(name="b", updates=2, schedule=LONG_WARMUP)],
            r"schedule\.warmup\.updates: 4 is 2 of the training of 2 updates",
        ),
        (
            [Stage(name="a", epochs=1), Stage(name="b", epochs=1, freeze=["x.*"])],
            r"phases\.b\.freeze: the pattern",
        ),
    ],
)
def test_what_cannot_be_is_named(stages: Any, message: str) -> None:
    steps = watch("on_step", lambda t: None)
    with pytest.raises(ConfigError, match=message):
        train(task_of(stages), steps=steps)
    assert not steps.seen  # at the start, and not when the stage is reached


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((3, 4), "stage a is over: it stays at 2 updates, though it is now planned for 3"),
        ((2, 6), "the run was planned for 6 updates and is now for 8"),
    ],
)
def test_a_changed_length_is_told_of_by_its_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lengths: tuple[int, int], message: str
) -> None:
    def go(first: int, second: int) -> int:
        stages = [Stage(name="a", updates=first), Stage(name="b", updates=second)]
        task = r1.make_task(tmp_path, phases=stages, schedule=Schedule(cosine()))
        return train(task, learning_rate=LearningRate(), save=Checkpoint()).updates

    assert go(2, 4) == 6
    assert go(*lengths) == 2 + lengths[1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith(message)


class Counting:
    """A step that counts its calls, which is its state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, task: Task) -> None:
        self.calls += task.train
        task.record("calls", self.calls)
        standard_train_step(task)

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def stages_of_r1() -> list[Stage]:
    """Three stages, of which every one has something of its own."""
    return [
        Stage(name="warm", epochs=0.7, freeze=["0.*"], train_step=Counting()),
        Stage(name="main", epochs=1.2, repeat=2, schedule=r1.schedule("composite"),
              train=Data(r1.Samples(36, augment=True), 5), test_every_epochs=0.5),
        Stage(name="end", updates=4, train_step=Counting(), test_at_start=True),
    ]  # fmt: skip


def train_in_stages(folder: Path, probe: Path, at: At | None = None) -> dict[str, Any]:
    """Train R1 in stages."""
    hooks = {} if at is None else {"at": at}
    return r1.train(
        folder, probe, hooks=hooks, phases=stages_of_r1(), test=True,
        schedule=r1.Plan("constant"), save={"every_updates": 1},
    )  # fmt: skip


# 7 updates; twice 8 in the first epoch (36 samples by 5) and ceil(.2 * 8) = 2 in the second; 4.
@pytest.mark.parametrize(
    "at",
    [
        At("on_step", 3), At("on_phase_end", 7), At("on_phase_end", 7, phase="test"),
        At("on_step", 9), At("on_step", 7 + 8), At("on_step", 7 + 9), At("on_phase_end", 17),
        At("on_step", 20), At("on_step", 28), At("on_step", 27, phase="test"),
    ],
    ids=lambda at: f"{at.event} {at.phase} {at.updates}",
)  # fmt: skip
def test_a_run_in_stages_is_resumed(tmp_path: Path, at: At) -> None:
    whole = _whole(tmp_path)
    folder = tmp_path / "run"
    killed = process.run(train_in_stages, folder, probe_of(folder), at)
    assert killed.code == -signal.SIGKILL, killed.output
    ended = process.result(train_in_stages, folder, probe_of(folder))
    assert ended["updates"] == 7 + 2 * 10 + 4
    assert_eq(whole, folder)


_wholes: list[Path] = []


def _whole(tmp_path: Path) -> Path:
    if not _wholes:
        folder = process.scratch() / "stages" / "reference"
        process.result(train_in_stages, folder, probe_of(folder))
        _wholes.append(folder)
    return _wholes[0]
