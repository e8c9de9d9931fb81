"""The learning-rate range test: what it finds, and that it leaves everything as it was."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fvcore.common.param_scheduler import ParamScheduler
from torch import Tensor, nn

from phaseloop import (
    ConfigError,
    Data,
    Gradients,
    Hook,
    PhaseloopError,
    Phases,
    Schedule,
    Task,
    TensorData,
    Trainer,
)
from phaseloop.engine import rng
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.tools import find_lr as program
from phaseloop.tools.range_test import Found, RangeTest, _taking_part, find_lr, steepest
from phaseloop.tools.run import DONE, ERROR, WRONG_CONFIG
from phaseloop.tools.run import run as train_here
from phaseloop.train_steps.standard import standard_train_step
from tests.rigs import cli, r0, r1
from tests.rigs.equal import assert_eq, differ, probe_of, reference

CURVATURE = 4.0


def quadratic(output: Tensor, target: Any) -> Tensor:
    """a / 2 * w**2, where the output is w."""
    return (CURVATURE / 2 * output**2).mean()


def bowl(**options: Any) -> Task:
    """One weight, w = 1, in a parabola; four samples, so that the batches soon run out."""
    return r0.r0([1.0] * 4, 2, w=1.0, criterion=quadratic, precision="float64", **options)


# --- what it finds ---


def test_a_quadratic_turns_up_where_descent_is_no_longer_stable() -> None:
    """w becomes (1 - rate * a) * w at each update: it grows above 2 / a and nowhere below."""
    settings = RangeTest(start=1e-3, end=10, updates=60)
    rates = [1e-3 * 10 ** (4 * k / 59) for k in range(60)]
    w, expected = 1.0, []
    for rate in rates:
        expected.append(CURVATURE / 2 * w**2)
        w *= 1 - rate * CURVATURE

    found = find_lr(bowl(), settings)
    made = len(found.rates)
    assert found.rates == pytest.approx(rates[:made])
    assert found.losses == pytest.approx(expected[:made], rel=1e-9)
    limit = 2 / CURVATURE
    lowest = int(np.argmin(found.losses))
    assert found.rates[lowest - 1] <= limit < found.rates[lowest + 1]
    assert found.suggestion is not None
    assert 0.05 * limit < found.suggestion < limit
    assert made < 60 and "more than 4 times its lowest value" in found.ended
    best = min(found.smoothed[:-1])
    assert found.smoothed[-1] > 4 * best >= found.smoothed[-2]


def test_a_low_loss_by_chance_at_the_start_neither_ends_it_nor_hides_the_fall() -> None:
    losses = iter([0.01, *[1.0] * 19, *[0.9**k for k in range(20)]])

    def scripted(output: Tensor, target: Any) -> Tensor:
        return output.mean() * 0 + next(losses)

    task = r0.r0([1.0] * 4, 2, criterion=scripted)
    found = find_lr(lambda: task, RangeTest(updates=40, smoothing=0.8))
    assert found.ended == "" and len(found.rates) == 40
    assert found.suggestion is not None and found.suggestion > found.rates[20]


def test_the_smoothed_loss_is_a_moving_average_without_bias() -> None:
    found = find_lr(bowl(), RangeTest(updates=5, end=1e-3, smoothing=0.75))
    average, expected = 0.0, []
    for k, loss in enumerate(found.losses, 1):
        average = 0.75 * average + 0.25 * loss
        expected.append(average / (1 - 0.75**k))
    assert found.smoothed == pytest.approx(expected)
    assert found.ended == "" and found.signal is None


def test_linear_rates() -> None:
    found = find_lr(bowl(), RangeTest(start=0.1, end=0.3, updates=5, curve="linear"))
    assert found.rates == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3])


class Bounded(r0.Scalar):
    """Gives NaN for a large weight."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.w.abs() > 10, torch.nan, super().forward(x))


def test_a_loss_that_is_not_finite_ends_it(tmp_path: Path) -> None:
    model = Bounded(1.0)
    task = bowl(optimizer=lambda *_, **__: torch.optim.SGD(model.parameters(), lr=1.0))
    task.bare_model = model
    settings = RangeTest(start=0.4, end=100, updates=50, diverge=1e30, dir=str(tmp_path))
    found = find_lr(task, settings)
    assert "not finite at rate" in found.ended
    assert all(map(math.isfinite, found.losses)) and 2 < len(found.losses) < 50
    assert json.loads((tmp_path / "find_lr.json").read_text())["losses"] == found.losses


def test_steepest() -> None:
    rates = [10.0**k for k in range(8)]
    #        falls by      0    1    1    3    3    0   -9
    smoothed = [9.0, 9.0, 8.0, 7.0, 4.0, 1.0, 1.0, 10.0]
    assert steepest(rates, smoothed) == 10.0**4  # 3 to both sides
    assert steepest(rates, [9.0, 1.0, 0.9, 0.8, 0.5, 0.4, 0.4, 1.0], skip=2) == 10.0**3
    assert steepest(rates, [1.0 + k for k in range(8)]) is None  # it only rises
    assert steepest(rates[:2], smoothed[:2]) is None


# --- it is the training itself that is tried ---


class Powers(ParamScheduler):  # type: ignore[misc]
    """The rates of a range test, as a schedule."""

    def __init__(self, settings: RangeTest) -> None:
        self.settings = settings

    def __call__(self, where: float) -> float:
        return self.settings.rate(round(where * self.settings.updates))


class Losses(Hook):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, task: Task) -> None:
        if task.updated:
            self.losses.append(task.recorder.row()["loss"])


def test_every_update_is_one_of_the_engine() -> None:
    """Micro-batches, clipping, precision, dropout, augmentation, a hook that skips, three epochs:
    the losses are those of a training whose schedule gives the same rates."""
    settings = RangeTest(start=1e-4, end=0.1, updates=25)

    def make(**options: Any) -> Task:
        return r1.make_task(
            None, augment=True, data={"micro_batch_size": 3}, precision="bfloat16",
            gradients=Gradients(clip_norm=0.5), **options,
        )  # fmt: skip

    losses = Losses()
    schedule = Schedule(lambda base, stretch: Powers(settings))
    task = make(schedule=schedule, epochs=None, phases={"updates": 25})
    hooks = {"skip": r1.SkipSome(), "losses": losses, "learning_rate": LearningRate()}
    Trainer(task, hooks).train()
    found = find_lr(make(), settings, {"skip": r1.SkipSome()})
    assert found.losses == losses.losses
    assert task.progress.epoch == 4  # 8 of 10 windows count: 24 updates in three epochs


@pytest.mark.parametrize(("rates", "base"), [((0.1, 0.01), 0.1), ((0.02, 0.04), 0.04)], ids=str)
def test_groups_keep_their_proportions(rates: tuple[float, float], base: float) -> None:
    """The default is the rate that counts, or the highest where no group has it."""
    seen: list[list[float]] = []

    def step(task: Task) -> None:
        standard_train_step(task)
        seen.append([group["lr"] for group in task.optimizers["optimizer"].param_groups])

    model = r1.network()
    groups = [
        {"params": model[n].parameters(), "lr": lr} for n, lr in zip((0, 3), rates, strict=True)
    ]
    task = r1.make_task(
        None, model=model, train_step=step, optimizer=torch.optim.SGD(groups, lr=0.1)
    )
    found = find_lr(task, RangeTest(start=1e-3, end=1e-2, updates=3, curve="linear"))
    assert found.base == base
    wanted = [[rate * lr / base for lr in rates] for rate in found.rates]
    assert np.allclose(seen, wanted) and len(seen) == 3


def test_hooks_that_change_the_training_take_part_as_copies(tmp_path: Path) -> None:
    counter = r1.Counter()
    hooks = r1.make_hooks(tmp_path / "probe", skip=r1.SkipSome(), counter=counter)
    # The probe of these tests draws random numbers, and so does not only watch.
    assert set(_taking_part(hooks)) == {"meter_sync", "probe", "skip", "counter"}
    find_lr(bowl(), RangeTest(updates=3), {"counter": counter})
    assert counter.counts == {}


# --- everything is left as it was ---


def test_a_task_trains_afterwards_as_if_it_had_not_been_tried(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    task = r1.make_task(folder)
    model, optimizer = task.bare_model, task.given_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    generators = rng.host_state()
    find_lr(task, RangeTest(start=1e-2, end=1, updates=15))
    assert list(differ("", generators, rng.host_state())) == []
    assert list(differ("", before, [model.state_dict(), optimizer.state_dict()])) == []
    assert all(p.grad is None for p in model.parameters())
    assert not folder.exists()
    Trainer(task, r1.make_hooks(probe_of(folder))).train()
    assert_eq(reference(), folder)


def test_generators_are_put_back_after_an_error_too() -> None:
    def step(task: Task) -> None:
        task.next_batch()
        torch.rand(3)
        raise ValueError("in the step")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="in the step"):
        find_lr(bowl(train_step=step), RangeTest(updates=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_a_function_makes_the_task() -> None:
    tasks: list[Task] = []

    def make() -> Task:
        torch.rand(3)
        tasks.append(bowl())
        return tasks[0]

    state = torch.get_rng_state()
    settings = RangeTest(updates=5)
    assert find_lr(make, settings) == find_lr(bowl(), settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(tasks) == 1 and tasks[0].progress.updates == 5


def test_a_signal_breaks_it_off_and_nothing_is_written(tmp_path: Path) -> None:
    def step(task: Task) -> None:
        standard_train_step(task)
        if task.progress.updates == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    found = find_lr(bowl(train_step=step), RangeTest(dir=str(tmp_path / "out")))
    assert found.signal == signal.SIGTERM and len(found.rates) == 4
    assert not (tmp_path / "out").exists()


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0.0}, "find_lr.start: 0.0 is not a rate greater than 0"),
        ({"start": 1.0, "end": 1.0}, "find_lr.end: 1.0 is not greater than start, 1.0"),
        ({"end": math.inf}, "find_lr.end"),
        ({"updates": 1}, "find_lr.updates: 1 is less than 2"),
        ({"curve": "cosine"}, "find_lr.curve: 'cosine' is not 'exponential' or 'linear'"),
        ({"smoothing": 1.0}, "find_lr.smoothing: 1.0 is not in [0, 1)"),
        ({"diverge": 1.0}, "find_lr.diverge: 1.0 is not a number greater than 1"),
    ],
    ids=str,
)
def test_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_lr(bowl(), RangeTest(**options))
    assert message in str(caught.value)


def test_tasks_that_cannot_be_tried() -> None:
    settings = RangeTest(updates=3)
    test_only = Task(
        model=r1.network(), test=Data(TensorData(torch.zeros(2, 4)), 2), phases=Phases(epochs=1)
    )
    with pytest.raises(ConfigError, match=r"data\.train: .* needs training data"):
        find_lr(test_only, settings)
    trained = bowl()
    Trainer(trained, {}).train()
    with pytest.raises(PhaseloopError, match="trained already"):
        find_lr(trained, settings)
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.0 cannot be scaled"):
        find_lr(bowl(lr=0.0), settings)
    odd = bowl()
    odd.bare_model.open = (n for n in range(3))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="give a function that makes it"):
        find_lr(odd, settings)


def test_a_step_without_a_loss() -> None:
    def step(task: Task) -> None:
        task.backward(task.forward(task.next_batch().input).mean())
        task.update()

    with pytest.raises(PhaseloopError, match="reports no loss"):
        find_lr(bowl(train_step=step), RangeTest(updates=3))


# --- the command line ---


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a folder, but for what the range test writes."""
    found = (p for p in folder.rglob("*") if p.is_file() and "find_lr" not in p.parts)
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in found}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A true process; the run that is in the folder is not touched."""
    monkeypatch.chdir(cli.folder(tmp_path))
    assert train_here(["config=tiny", "phases.epochs=1"]) == DONE
    before = files(tmp_path / "runs")
    words = ["config=tiny", "find_lr.start=1e-3", "++find_lr.end=1e2", "find_lr.updates=30",
             "data.train.batch_size=8"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(cli.ROOT / "tools/find_lr.py"), *words],
        cwd=tmp_path, env=cli.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "runs") == before
    folder = tmp_path / "runs/tiny/find_lr"
    numbers = json.loads((folder / "find_lr.json").read_text())
    assert numbers["rates"][0] == 1e-3 and numbers["settings"]["end"] == 100.0
    assert len(numbers["rates"]) == len(numbers["losses"]) == len(numbers["smoothed"]) > 10
    assert f"suggestion  optimizer.lr={numbers['suggestion']:.2g}" in done.stdout
    assert (folder / "find_lr.png").stat().st_size > 5000
    assert "picture     runs/tiny/find_lr/find_lr.png" in done.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(cli.folder(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["find_lr.end=0"], "find_lr.end: 0.0 is not greater than start"),
        (["find_lr.strat=1"], "find_lr.strat: there is no such key. Did you mean 'start'?"),
        (["find_lr.curve=cosine"], "find_lr.curve: 'cosine' is not 'exponential' or 'linear'"),
        (["find_lr.updates=1.5"], "find_lr.updates: 1.5 is not int"),
        (["find_lr.end='1e-3'"], "find_lr.end: '1e-3' (it is quoted: a string) is not float"),
        (["find_lr.end=1,2"], "find_lr.end: several values"),
        (["find_lr={end: 1}"], "find_lr: give its keys one by one"),
        (["--multirun"], "--multirun: one range test is made at a time"),
        (["plan=true"], "plan: is for tools/run.py"),
        (["only=test"], "only: is for tools/run.py"),
        (["data.train=null"], "data.train: a learning-rate range test needs training data"),
        (["optimizer.lrr=1"], "optimizer.lrr: SGD takes no option 'lrr'"),
        (["optimizer.lr=0"], "optimizer.lr: 0.0 cannot be scaled"),
    ],
    ids=str,
)
def test_wrong_words(here: Path, capsys: Any, words: list[str], said: str) -> None:
    assert program.run(["config=tiny", *words]) == WRONG_CONFIG
    assert f"wrong configuration: {said}" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_error_in_the_training(here: Path, capsys: Any) -> None:
    assert program.run(["config=tiny", "hooks.tiny_fault={}"]) == ERROR
    assert "ValueError: planted fault" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_folder_of_ones_own_and_no_suggestion(here: Path, capsys: Any) -> None:
    words = ["find_lr.updates=2", "find_lr.dir=else/where", "schedule=cosine"]
    assert program.run(["config=tiny", *words]) == DONE
    out = capsys.readouterr().out
    assert "tried       2 updates, learning rates 1e-07 to 10" in out
    assert "suggestion  none: the loss did not fall" in out
    assert Path("else/where/find_lr.png").exists() and not Path("runs").exists()


def test_several_optimizers_are_scaled_together() -> None:
    found = Found([0.2], [1.0], [1.0], 0.2, "", 0.1)
    assert program._override(found, several=True) == "2 times the rate of every optimizer"
    assert program._override(found, several=False) == "optimizer.lr=0.2"
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    optimizers = {n: torch.optim.SGD(model[n].parameters(), lr=lr) for n, lr in
                  {"a": 0.1, "b": 0.3}.items()}  # fmt: skip
    seen: list[list[float]] = []

    def step(task: Task) -> None:
        batch = task.next_batch()
        out = task.bare_model["a"](batch.input) + task.bare_model["b"](batch.input)
        task.backward(task.criterion(out, batch.target))
        task.update()
        seen.append([o.param_groups[0]["lr"] for o in task.optimizers.values()])

    task = r1.make_task(None, model=model, optimizer=optimizers, train_step=step)
    rates = find_lr(task, RangeTest(updates=3)).rates
    assert np.allclose(seen, [[rate, 3 * rate] for rate in rates])
