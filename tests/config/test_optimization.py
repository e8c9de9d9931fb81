"""Optimizer and schedules from a configuration: every form, and what is refused before any data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import phaseloop.train_steps  # noqa: F401 registers the steps
from phaseloop import Schedule, Task, TorchSchedule
from phaseloop.engine.checkpoint.store import Store
from phaseloop.engine.config.build import build
from phaseloop.engine.config.compose import compose
from phaseloop.engine.config.schema import check
from phaseloop.engine.recorder import POSITION
from phaseloop.tools.run import DONE, WRONG_CONFIG
from phaseloop.tools.run import run as run_here
from tests.rigs import cli

PLATEAU = "{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, %s}"
STEP = "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 2%s}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the experiment ``tiny``, as the current one."""
    cli.folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(*words: str) -> Task:
    """The task of ``tiny`` with these words, built and planned."""
    task = build(check(compose(["config=tiny", *words]).config)).task
    task.build()
    return task


def refused(capsys: pytest.CaptureFixture[str], *words: str, reads_data: bool = False) -> str:
    opened = [f"data.{kind}.dataset.marker=opened" for kind in ("train", "test")]
    assert run_here(["config=tiny", *words, *opened]) == WRONG_CONFIG
    if not reads_data:
        assert not Path("opened").exists(), "a data set was opened before the mistake was found"
    return capsys.readouterr().err


def rows() -> list[dict[str, Any]]:
    lines = Path("runs/tiny/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def test_one_schedule_and_several_by_option(here: Path) -> None:
    one = made("schedule={name: linear, option: momentum, interval: epoch}")
    (schedule,) = one.schedules
    assert isinstance(schedule, Schedule)
    assert (schedule.option, schedule.interval, schedule.key) == ("momentum", "epoch", "schedule")

    text = (
        "{lr: {name: cosine, warmup: {updates: 2}}, momentum: {name: linear, end: 0.5}, "
        "weight_decay: null}"
    )
    several = made(f"schedule={text}", "optimizer.momentum=0.9")
    assert [(s.option, s.key) for s in several.schedules if isinstance(s, Schedule)] == [
        ("lr", "schedule.lr"), ("momentum", "schedule.momentum"),
    ]  # fmt: skip


def test_the_key_is_a_name_where_the_option_is_said(here: Path) -> None:
    rules = "optimizer.groups={rules: {head: {match: '3.*', lr_scale: 2}}}"
    text = (
        "{lr: {name: constant, groups: [rest]}, fall: {name: linear, option: lr, groups: [head]}}"
    )
    task = made(f"schedule={text}", rules)
    rates = task.rates["optimizer"]
    rates.set(3, 0)
    base = task.optimizers["optimizer"].defaults["lr"]
    values = {g["name"]: g["lr"] for g in rates.optimizer.param_groups}
    assert values == {"rest": base, "head": pytest.approx(2 * base * (1 - 3 / task.plan.updates))}


def test_what_is_scheduled_is_logged_by_its_own_name(here: Path) -> None:
    text = "{lr: {name: cosine}, momentum: {name: linear, end: 0.5}, weight_decay: {name: cosine}}"
    words = ["optimizer={name: adamw, lr: 0.01, groups: {no_decay: [bias]}}", f"schedule={text}"]
    assert run_here(["config=tiny", *words, "run.log_every=1", "hooks.curves=null"]) == DONE
    first = rows()[0]
    assert {k: v for k, v in first.items() if k not in ("loss", *POSITION)} == {
        "lr/rest": 0.01, "lr/no_decay": 0.01, "momentum/rest": 0.9, "momentum/no_decay": 0.9,
        "weight_decay/rest": 0.01, "weight_decay/no_decay": 0.0,
    }  # fmt: skip
    assert rows()[-1]["momentum/rest"] < 0.6


def test_a_scheduler_of_torchs_and_one_inside_another(here: Path) -> None:
    task = made(f"schedule={STEP % ', interval: epoch, frequency: 3'}")
    (schedule,) = task.schedules
    assert isinstance(schedule, TorchSchedule)
    assert (schedule.interval, schedule.frequency) == ("epoch", 3)
    parts = "[{_target_: torch.optim.lr_scheduler.LinearLR, total_iters: 2}, %s]" % (STEP % "")
    for outer in ("SequentialLR, milestones: [2]", "ChainedScheduler"):
        name, _, more = outer.partition(",")
        more = f",{more}" if more else ""
        text = f"{{_target_: torch.optim.lr_scheduler.{name}, schedulers: {parts}{more}}}"
        mover = made(f"schedule={text}").rates["optimizer"].mover
        assert mover is not None and type(mover.scheduler).__name__ == name


def test_a_plateau_runs_from_a_configuration(here: Path) -> None:
    text = PLATEAU % "metric: test/loss, factor: 0.5, patience: 0, threshold: 0.99"
    words = ["phases.epochs=3", f"schedule={text}", "run.log_every=1"]
    assert run_here(["config=tiny", *words, "hooks.curves=null"]) == DONE
    lr = [row["lr"] for row in rows()]
    assert lr[-1] == lr[0] / 2  # 99 % better than the first test, the second is not


def test_group_rules_from_a_configuration(here: Path) -> None:
    rules = (
        "{no_decay: [bias], layer_decay: {factor: 0.5, layers: '*'}, "
        "rules: {head: {match: '3.*', lr_scale: 10}}}"
    )
    task = made(f"optimizer={{name: adamw, lr: 0.1, groups: {rules}}}")
    groups = {g["name"]: g for g in task.optimizers["optimizer"].param_groups}
    assert {name: group["lr"] for name, group in groups.items()} == {
        "0": 0.1 * 0.25, "0.no_decay": 0.1 * 0.25,
        "head.3": 0.1 * 10 * 0.5, "head.3.no_decay": 0.1 * 10 * 0.5,
    }  # fmt: skip
    assert {name for name, group in groups.items() if group["weight_decay"] == 0} == {
        "0.no_decay", "head.3.no_decay",
    }  # fmt: skip


def test_scales_are_those_of_the_optimizers_default_rate(here: Path) -> None:
    rules = "{rules: {head: {match: '3.*', lr_scale: 10}}}"
    task = made(f"optimizer={{name: adamw, groups: {rules}}}")
    assert [g["lr"] for g in task.optimizers["optimizer"].param_groups] == [0.001, 0.01]


def test_lars_by_name(here: Path) -> None:
    task = made("optimizer=lars", "optimizer.clip=true")
    assert type(task.optimizers["optimizer"]).__name__ == "LARS"
    assert task.optimizers["optimizer"].param_groups[0]["clip"] is True


@pytest.mark.parametrize(
    ("rule", "factor", "text"),
    [("linear", 2.0, "linearly"), ("sqrt", 2**0.5, "by the square root")],
)
def test_the_rate_follows_the_batch_size_and_the_log_says_so(
    here: Path, caplog: pytest.LogCaptureFixture, rule: str, factor: float, text: str
) -> None:
    scale = f"scale_with_batch: {{base: 4, rule: {rule}}}"
    words = ["optimizer.lr=0.1", "data.train.batch_size=8"]
    with caplog.at_level("INFO", "phaseloop"):
        task = made(*words, f"schedule={{name: linear, {scale}}}")
    assert [
        record.getMessage() for record in caplog.records if "scaled" in record.getMessage()
    ] == [f"learning rate 0.1 -> {0.1 * factor:g}: scaled {text} with batch size 8 / 4"]
    rates = task.rates["optimizer"]
    rates.set(0, 0)
    assert rates.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor)
    rates.set(3, 0)
    rest = 1 - 3 / task.plan.updates
    assert rates.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor * rest)
    task = made(*words, f"schedule={STEP % f', {scale}'}")  # and torch's
    assert task.optimizers["optimizer"].param_groups[0]["lr"] == pytest.approx(0.1 * factor)
    rules = "optimizer.groups={rules: {head: {match: '3.*', lr_scale: 10}}}"
    task = made(*words, rules, f"schedule={{name: linear, {scale}}}")
    task.rates["optimizer"].set(0, 0)
    lr = [g["lr"] for g in task.optimizers["optimizer"].param_groups]
    assert lr == pytest.approx([0.1 * factor, factor])


def test_a_resumed_run_is_not_scaled_twice(here: Path) -> None:
    scale = "schedule={name: constant, scale_with_batch: {base: 2}}"
    words = ["config=tiny", "optimizer.lr=0.01", scale, "run.log_every=1", "hooks.curves=null"]
    assert run_here([*words, "phases.epochs=1"]) == DONE
    assert run_here([*words, "phases.epochs=2"]) == DONE
    batch_size = check(compose(words).config).data.train.batch_size  # type: ignore[union-attr]
    assert {row["lr"] for row in rows()} == {0.01 * batch_size / 2}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("schedule={lr: {name: cosin}}", "schedule.lr.name: no schedule is called 'cosin'"),
        ("schedule={lr: {name: cosine, ned: 1}}", "schedule.lr.ned: cosine takes no option"),
        ("schedule={lr: {name: step}}", "schedule.lr.steps: give exactly one"),
        ("schedule={lr: {name: multi_step, milestones: [2]}}", "schedule.lr.milestones: [2"),
        ("schedule={lr: {name: step, steps: 2, unit: hours}}", "schedule.lr.unit: 'hours' is not"),
        ("schedule={lrr: {name: cosine}}",
         "schedule.lrr.option: the optimizer has no option 'lrr'. Did you mean 'lr'?"),
        ("schedule={warmup: {updates: 3}}", "schedule.name: give the name of a schedule"),
        ("schedule={lr: cosine}", "schedule.name: give the name of a schedule"),
        ("schedule={lr: {name: cosine, warmup: {update: 3}}}", "schedule.lr.warmup.update: there"),
        ("schedule={name: cosine, groups: head}", "schedule.groups: 'head' is not"),
        ("schedule={name: cosine, interval: batch}", "schedule.interval: 'batch'"),
        ("schedule={name: cosine, metric: test/loss}", "schedule.metric: cosine takes no option"),
        ("schedule={momentum: {name: cosine, scale_with_batch: {base: 2}}}",
         "schedule.momentum.scale_with_batch: is for the option lr"),
        ("schedule={lr: {name: cosine, scale_with_batch: {base: 0}}}",
         "schedule.lr.scale_with_batch.base: 0 is less than 1"),
        ("schedule={name: cosine, scale_with_batch: {base: 2, rule: cube}}",
         "schedule.scale_with_batch.rule: 'cube' is not one of linear, sqrt"),
        (f"schedule={STEP % ', warmup: {updates: 2}'}", "schedule.warmup: does not go with"),
        (f"schedule={{momentum: {STEP % ''}}}", "schedule.momentum: a scheduler of torch's"),
        (f"schedule={STEP % ', gama: 2'}", "schedule.gama: StepLR takes no option 'gama'"),
        (f"schedule={STEP % ', interval: batch'}", "schedule.interval: 'batch'"),
        (f"schedule={STEP % ', frequency: 0.5'}", "schedule.frequency: 0.5 is not int"),
        ("schedule={_target_: torch.optim.lr_scheduler.StepLR}", "schedule.step_size: StepLR"),
        (f"schedule={PLATEAU % 'factor: 0.5'}", "schedule.metric: ReduceLROnPlateau needs one"),
        (f"schedule={STEP % ', metric: test/loss'}", "schedule.metric: StepLR takes no metric"),
        (f"schedule={PLATEAU % 'metric: test/loss, interval: epoch'}", "schedule.interval: says"),
        ("schedule={_target_: torch.optim.lr_scheduler.ChainedScheduler, schedulers: [%s]}"
         % (STEP % ", gama: 2"), "schedule.schedulers.0.gama: StepLR takes no option"),
        ("optimizer.groups={nodecay: [bias]}", "optimizer.groups.nodecay: there is no such key"),
        ("optimizer.groups={no_decay: bias}", "optimizer.groups.no_decay: 'bias' is not a list"),
        ("optimizer.groups={rules: {head: {lr: 1}}}", "optimizer.groups.rules.head.match"),
        ("optimizer.groups={layer_decay: {layers: '*'}}", "optimizer.groups.layer_decay.factor"),
        ("optimizer={name: lars}", "optimizer.lr: LARS needs a value"),
    ],
)  # fmt: skip
def test_a_mistake_is_found_before_data_is_opened(
    here: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    text = refused(capsys, word)
    assert text.startswith(f"wrong configuration: {said}"), text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.groups={rules: {head: {match: 'haed.*', lr: 1}}}",
         "optimizer.groups.rules.head.match: 'haed.*' matches no parameter. The nearest are: "),
        ("schedule={name: cosine, groups: [head]}", "schedule.groups: no parameter group is"),
        (f"schedule={PLATEAU % 'factor: 2.0, metric: test/loss'}", "schedule: Factor should be <"),
        (f"schedule={PLATEAU % 'metric: test/lost'}",
         "schedule.metric: no metric is called 'test/lost'. Did you mean 'test/loss'? There are: "),
        (f"schedule={PLATEAU % 'metric: test/loss, mode: max'}",
         "schedule.mode: is 'max', but a lower test/loss is better"),
        ("schedule={lr: {name: composite, lengths: [900, null], unit: epochs, parts: "
         "[{name: constant}, {name: cosine}]}}", "schedule.lr.lengths: [900, None] epochs do not"),
        ("schedule={name: cosine, start: 0.1, scale_with_batch: {base: 2}}",
         "schedule.scale_with_batch: the curve gives the values themselves"),
        ("optimizer={name: lars, lr: -1}", "optimizer.lr: -1"),
    ],
)  # fmt: skip
def test_a_mistake_that_shows_with_the_model_is_found_before_a_sample_is_read(
    here: Path, capsys: pytest.CaptureFixture[str], word: str, said: str
) -> None:
    text = refused(capsys, word, reads_data=True)
    assert text.startswith(f"wrong configuration: {said}"), text
    assert not Store(Path("runs/tiny/checkpoints")).exists()


def test_the_plan_lists_the_groups(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Linear(4, 8) and Linear(8, 2): 40 and 18 parameters."""
    rules = "{no_decay: [bias], rules: {head: {match: '3.*', lr_scale: 10}}}"
    words = [f"optimizer={{name: adamw, lr: 0.1, groups: {rules}}}",
             "schedule={lr: {name: cosine}, weight_decay: {name: linear}}"]  # fmt: skip
    assert run_here(["config=tiny", *words, "plan=true"]) == DONE
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = lines.index(["parameter", "groups"])
    assert lines[start + 1 : start + 6] == [
        ["parameters", "lr", "weight", "decay"],
        ["rest", "32", "0.1", "0.01"],
        ["no_decay", "8", "0.1", "0"],
        ["head", "16", "1", "0.01"],
        ["head.no_decay", "2", "1", "0"],
    ]
    assert torch.is_grad_enabled()
    assert list(Path("runs/tiny").glob("plan.png"))
