"""Several optimizers, stages, and the loss scale, as a configuration says them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import phaseloop.hooks
import phaseloop.train_steps  # noqa: F401 registers the steps
from phaseloop import ConfigError
from phaseloop.engine.checkpoint.compare import forbidden_changes
from phaseloop.engine.config.build import build
from phaseloop.engine.config.compose import compose, merge
from phaseloop.engine.config.schema import check
from phaseloop.engine.task import Task
from phaseloop.tools import run as program
from tests.rigs import cli

PAIR = """\
# @package _global_
defaults: [tiny, override /optimizer: null, _self_]
optimizers:
  first: {name: sgd, lr: 0.5, parameters: "0.*", gradients: {clip_norm: 1.0}}
  last: {name: adam, lr: 0.01, parameters: ["3.*"], every: 2, schedule: {name: cosine},
         groups: {no_decay: [bias]}, weight_decay: 0.1}
schedule: {name: linear}
"""
STAGES = """\
# @package _global_
defaults: [tiny, _self_]
phases:
  - {name: warm, epochs: 0.5, freeze: ["0.*"], test_every_epochs: null}
  - name: main
    updates: 4
    repeat: 2
    data: {train: {dataset: {name: tiny_data, samples: 16}, batch_size: 8}}
    schedule: {name: cosine}
    train_step: standard
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cli.folder(tmp_path, pair=PAIR, stages=STAGES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def task_of(*words: str) -> Task:
    """The task of a configuration, built."""
    task = build(check(compose(list(words)).config)).task
    task.build()
    return task


def test_optimizers_by_name_each_with_its_own(here: Path) -> None:
    task = task_of("config=pair")
    first, last = task.optimizers["first"], task.optimizers["last"]
    assert isinstance(first, torch.optim.SGD) and isinstance(last, torch.optim.Adam)
    names = task.parameter_names()
    moved = {n: sorted(names[id(p)] for p in ps) for n, ps in task.parameters_of.items()}
    assert moved == {"first": ["0.bias", "0.weight"], "last": ["3.bias", "3.weight"]}
    assert task.every == {"first": 1, "last": 2}
    assert (task.clipping["first"].clip_norm, task.clipping["last"].clip_norm) == (1.0, None)
    assert {group["weight_decay"] for group in last.param_groups} == {0.0, 0.1}
    # 30 updates, 15 of them the second's: half a cosine over 15, a straight line over 30.
    line = task.rates["first"].schedules[0].value(0.5, 15, 0)
    curve = task.rates["last"].schedules[0].value(0.01, 5, 0)
    assert line == pytest.approx(0.25)
    assert curve == pytest.approx(0.01 * 0.75)  # cos(pi / 3) is a half


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optimizers.last.parameters=null", r"optimizers\.last\.parameters: null is not"),
        ("optimizers.last.parameters=2.*", r"optimizers\.last\.parameters: the pattern '2\.\*'"),
        ("optimizers.last.parameters=*", r"optimizers\.first moves 0\.bias already"),
        ("optimizers.last.betas=0.5", r"optimizers\.last: 'float' object"),
        ("optimizers.last.momentum=0.5", r"optimizers\.last\.momentum: Adam takes no option"),
        ("optimizers.last.every=0", r"optimizers\.last\.every: 0 is less than 1"),
        ("optimizers.first.every=2", "one must have every=1"),
        ("optimizers.first.gradients.clip_nrom=2", r"optimizers\.first\.gradients\.clip_nrom: "),
        ("optimizers.last.schedule.nam=x", r"optimizers\.last\.schedule"),
        ("optimizer=sgd", "optimizers: give these or optimizer, not both"),
    ],
)
def test_what_is_wrong_with_optimizers_is_named(here: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of("config=pair", word)


def test_a_batch_that_cannot_be_mixed_names_its_stage(here: Path) -> None:
    task = task_of(
        "config=stages", "phases.main.data.train.batch_transform={name: mixup, classes: null}"
    )
    key = "phases.main.data.train.batch_transform.classes"
    loader = task.stages.loaders[1]
    assert loader is not None
    with pytest.raises(ConfigError, match=f"^{key}: the targets are class numbers") as error:
        next(loader.batches(1, 0, 0))
    assert error.value.key == key


def test_a_parameter_that_no_optimizer_moves_is_said(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task_of("config=pair", "optimizers.last=null")
    assert "no optimizer moves 3.weight, 3.bias" in caplog.text


def test_a_stage_has_schedules_for_all_optimizers_or_by_name(here: Path) -> None:
    def schedules_of(word: str) -> dict[str, list[str]]:
        stage = f"{{name: a, epochs: 1, schedule: {word}}}"
        given = task_of("config=pair", f"phases=[{stage}]").stages.given[0].schedule
        return {name: [schedule.key for schedule in made] for name, made in given.items()}

    key = "phases.a.schedule"
    assert schedules_of("{name: cosine}") == {"first": [key], "last": [key]}
    assert schedules_of("{last: {name: cosine}}") == {"first": [], "last": [f"{key}.last"]}
    assert schedules_of("{last: {lr: {name: cosine}}}") == {
        "first": [], "last": [f"{key}.last.lr"],
    }  # fmt: skip


def test_stages_by_name_each_with_its_own(here: Path) -> None:
    task = task_of("config=stages")
    assert [stage.name for stage in task.stages.given] == ["warm", "main", "main"]
    # 40 samples by 4 are 10 updates an epoch; 16 by 8 are 2.
    assert [plan.updates for plan in task.stages.plans()] == [5, 4, 4]
    assert [plan.epochs for plan in task.stages.plans()] == [0.5, 2, 2]
    assert task.stages.updates == 13


def test_a_word_may_change_one_stage(here: Path) -> None:
    task = task_of("config=stages", "phases.main.updates=2", "phases.main.repeat=1")
    assert [plan.updates for plan in task.stages.plans()] == [5, 2]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("phases.man.updates=2", r"phases\.man: .* Did you mean 'main'"),
        ("phases.epochs=2", r"phases\.epochs: phases is a list, and no entry of it"),
        ("phases.main.updtes=2", r"phases\.main\.updtes: there is no such key.*'updates'"),
        ("phases.main.repeat=0", r"phases\.main\.repeat: 0 is less than 1"),
        ("phases.main.train_step=nothing", r"phases\.main\.train_step.* no train step is called"),
        ("phases.main.schedule.name=cosin", r"phases\.main\.schedule\.name: .*'cosine'"),
        ("phases.main.data.train.batch_size=0", r"phases\.main\.data\.train\.batch_size: 0"),
        (
            "phases.main.data.train.sampler={name: balanced, per_class: 0}",
            r"phases\.main\.data\.train\.sampler\.per_class: 0 is less than 1",
        ),
        (
            "phases.main.data.train.batch_transform={name: mixup, alpha: 0}",
            r"phases\.main\.data\.train\.batch_transform\.alpha: 0",
        ),
        ("phases.main.test_sets=[tset]", r"no test set is called 'tset'"),
        ("phases=[]", "phases: the list of stages is empty"),
        ("phases=[{epochs: 1}]", r"phases\.0\.name: give every stage a name"),
        ("phases=[{name: a, epochs: 1}, {name: a, epochs: 1}]", "two stages are called 'a'"),
        ("phases=[{name: a}]", r"phases\.a\.epochs: give a length"),
    ],
)
def test_what_is_wrong_with_stages_is_named(here: Path, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of("config=stages", word)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["precision=float8"], "precision: 'float8' is not 'float32' or 'bfloat16' or 'float16'"),
        (["precision={name: float32, loss_scale: {initial: 2}}"], "only float16 needs it"),
        (
            ["precision={name: float16, loss_scale: {intial: 2}}"],
            r"loss_scale\.intial: .*'initial'",
        ),
    ],
)
def test_what_is_wrong_with_the_precision_is_named(
    here: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        task_of("config=tiny", *words)


def test_the_loss_scale(here: Path) -> None:
    task = task_of("config=tiny", "precision={name: float16, loss_scale: {initial: 8}}")
    assert task.precision.scaler is not None
    assert task.precision.scaler.state_dict()["scale"] == 8


def test_entries_of_a_list_are_merged_by_name_only_where_they_have_one() -> None:
    lower: dict[str, Any] = {"x": [{"name": "a", "n": 1}, {"name": "b"}], "y": [1, 2]}
    assert merge(lower, {"x": {"b": {"n": 2}}, "y": {"k": 1}}) == {
        "x": [{"name": "a", "n": 1}, {"name": "b", "n": 2}], "y": {"k": 1},
    }  # fmt: skip
    assert merge(lower, {"x": [{"name": "c"}]})["x"] == [{"name": "c"}]


def test_a_whole_run_in_stages_from_the_command_line(here: Path) -> None:
    first = cli.run(["config=stages"], here)
    assert first.returncode == 0, first.stderr
    assert "finished" in first.stdout + first.stderr
    # A stage that is over may not become another one; the last may become longer.
    longer = cli.forked(["config=stages", "phases.main.updates=6"], here)
    assert longer.returncode == 0, longer.stderr
    assert "19 updates" not in first.stderr
    refused = cli.forked(["config=stages", "phases.main.repeat=3"], here)
    assert refused.returncode == 2
    assert "phases.main.repeat: 2 -> 3" in refused.stderr


def test_stages_in_another_order_are_another_run(here: Path) -> None:
    stages = ["{name: a, updates: 2}", "{name: b, updates: 2}"]
    assert cli.forked(["config=tiny", f"phases=[{', '.join(stages)}]"], here).returncode == 0
    refused = cli.forked(["config=tiny", f"phases=[{', '.join(stages[::-1])}]"], here)
    assert refused.returncode == 2
    assert "phases.order: ['a', 'b'] -> ['b', 'a']" in refused.stderr


def test_how_a_stages_data_are_read_may_change() -> None:
    def config(**changes: Any) -> dict[str, Any]:
        train = {"batch_size": 4, **changes}
        return {"phases": [{"name": "a", "epochs": 1, "data": {"train": train}}]}

    assert not forbidden_changes(config(), config(workers=2, micro_batch_size=2))
    assert forbidden_changes(config(), config(batch_size=8)) == [
        "phases.a.data.train.batch_size: 4 -> 8"
    ]


def test_stages_may_be_swept(here: Path) -> None:
    """Hydra itself could not put a list of stages in place of one stage."""
    words = ["--multirun", "config=stages", "phases.main.updates=1,2", "hooks.checkpoint=null"]
    swept = cli.forked(words, here)
    assert swept.returncode == 0, swept.stderr
    jobs = sorted(path.name for path in (here / "runs" / "stages").iterdir())
    assert jobs == [f"phases.main.updates={n},hooks.checkpoint=null" for n in (1, 2)]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("schedule={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, metric: test/loss}",
         "schedule.metric"),
        ("hooks.early_stop={metric: test/accuracy, patience: 1}", "hooks.early_stop.metric"),
        ("hooks.checkpoint={keep_best: 1, metric: test/loss}", "hooks.checkpoint.metric"),
    ],
)  # fmt: skip
def test_a_metric_that_never_comes_is_told_at_the_start(
    here: Path, capfd: pytest.CaptureFixture[str], word: str, key: str
) -> None:
    assert program.run(["config=tiny", "phases.test_every_epochs=null", word]) == 2
    assert f"{key}: 'test/" in (message := capfd.readouterr().err)
    assert "never comes, since test is never run" in message
