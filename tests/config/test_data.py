"""Data in a configuration: several test sets, mixes, samplers, limits, transforms, rebuilding."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import phaseloop.train_steps  # noqa: F401 registers the steps
from phaseloop import (
    ConfigError,
    Mix,
    register_augmentation,
    register_batch_transform,
    register_dataset,
    register_sampler,
    register_to_device,
)
from phaseloop.engine.config.build import Built, build
from phaseloop.engine.config.compose import compose
from phaseloop.engine.config.schema import check
from phaseloop.engine.trainer import Trainer
from phaseloop.tools.run import DONE, WRONG_CONFIG
from phaseloop.tools.run import run as run_here
from tests.rigs import cli
from tests.rigs.probes import watch

HERE = "tests.config.test_data"
TINY = "{name: tiny_data, samples: %d}"
SET = "{dataset: " + TINY + ", batch_size: 4}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the experiment ``tiny``, as the current one."""
    own = "imports: [tests.rigs.tiny, tests.config.test_data]\n"
    several = (
        cli.TINY.replace("imports: [tests.rigs.tiny]\n", own)
        .replace("  test: {dataset: {name: tiny_data, samples: 10}, batch_size: 4}\n",
                 f"  test: {{a: {SET % 10}, b: {SET % 6}}}\n")
    )  # fmt: skip
    mixed = cli.TINY.replace("imports: [tests.rigs.tiny]\n", own).replace(
        "  train: {dataset: {name: tiny_data}, batch_size: 4}\n",
        f"  train: {{mix: {{a: {{dataset: {TINY % 30}, weight: 2}}, b: {{dataset: {TINY % 10}}}}},"
        f" batch_size: 4}}\n",
    )
    one = cli.TINY.replace("imports: [tests.rigs.tiny]\n", own)
    cli.folder(tmp_path, several=several, mixed=mixed, one=one)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def built(*words: str) -> Built:
    return build(check(compose(words).config))


def train(made: Built, **hooks: Any) -> Any:
    made.hooks.update(hooks)
    return Trainer(made.task, made.hooks).train()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_here(list(words)) == WRONG_CONFIG
    assert not Path("runs").exists()
    return capsys.readouterr().err


# --- several test sets ---


def test_several_test_sets_each_with_its_own_meters(here: Path) -> None:
    made = built("config=several", "phases.epochs=1",
                 "meters.b={top2: {name: accuracy, top_k: 2}}")  # fmt: skip
    outcome = train(made)
    assert set(outcome.final) == {"train/loss", "a/loss", "a/accuracy", "b/loss", "b/top2"}
    assert made.task.progress.tests_due == []
    assert [made.task.loaders[name].samples for name in ("a", "b")] == [10, 6]


def test_met_e_meters_of_two_sets_share_nothing(here: Path) -> None:
    """Each set's metrics are those of a run that tests it alone."""
    both = train(built("config=several", "phases.epochs=1")).final
    for name in ("a", "b"):
        other = "b" if name == "a" else "a"
        alone = train(built("config=several", "phases.epochs=1", f"data.test.{other}=null"))
        assert alone.final[f"{name}/accuracy"] == both[f"{name}/accuracy"]
        assert f"{other}/loss" not in alone.final


def test_hooks_know_the_metrics_of_every_set(here: Path) -> None:
    words = ["config=several", "run.dir=runs/x",
             "hooks.early_stop={metric: a/accuracy, patience: 9}",
             "hooks.checkpoint={keep_best: 1, metric: b/loss}"]  # fmt: skip
    assert run_here(words) == DONE
    assert run_here([*words, "only=test", "weights=best"]) == DONE
    tested = json.loads(Path("runs/x/test.json").read_text())["metrics"]
    assert set(tested) == {"a/loss", "a/accuracy", "b/loss", "b/accuracy"}
    best = json.loads(Path("runs/x/status.json").read_text())["best"]
    assert tested["b/loss"] == best["b/loss"]


def test_workers_of_a_test_set_may_change_on_a_resume(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["config=several", "run.dir=runs/x"]
    assert run_here([*words, "phases.epochs=1"]) == DONE
    assert run_here([*words, "phases.epochs=2", "data.test.a.workers=1",
                     "data.test.b.micro_batch_size=2"]) == DONE  # fmt: skip
    assert run_here([*words, "phases.epochs=3", "data.test.a.dataset.samples=9"]) == WRONG_CONFIG
    assert "data.test.a.dataset.samples: 10 -> 9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["config=several", f"data.test.train={SET % 3}"], "data.test.train: a test set may have"),
        (["config=several", "meters.c={}"], "meters.c: there is no such key"),
        (["config=several", "meters.tset={}"], "Did you mean 'test'?"),
        (["config=several", "meters.b.acuracy={}"], "meters.b.acuracy"),
        (["config=several", "data.test.a.wokers=1"], "data.test.a.wokers: .*'workers'"),
        (["config=several", "data.test.a.dataset.sample=1"], "data.test.a.dataset.sample"),
        (["config=several", "data.test.a.sampler={name: balanced}"], "data.test.a.sampler"),
        (["config=several", "data.test.a.workers=-1"], "data.test.a.workers: -1"),
        (["config=several", "~data.test.a.dataset"], "data.test.a.dataset: a value is needed"),
        (["config=one", "~data.test.dataset"], "data.test.dataset: a value is needed"),
        (["config=one", "data.test.batch_size={1: 4}"], "data.test.batch_size"),
        (["config=one", "data.test.rebuild_every=1"], "data.test.rebuild_every: there is no such"),
    ],
    ids=str,
)
def test_mistakes_in_test_sets(
    here: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, refused(capsys, *words))


def test_another_form_of_data_takes_the_place_of_the_first(here: Path) -> None:
    several = built("config=one", f"data.test={{a: {SET % 10}, b: {SET % 6}}}").task
    assert list(several.test_data) == ["a", "b"]
    one = built("config=several", f"data.test={SET % 7}").task
    assert list(one.test_data) == ["test"]
    dataset = built("config=mixed", f"data.train.dataset={TINY % 5}")
    assert len(dataset.task.train_data.first) == 5
    mix = f"{{a: {{dataset: {TINY % 30}}}, b: {{dataset: {TINY % 10}}}}}"
    mixed = built("config=one", f"data.train.mix={mix}").task.train_data
    assert mixed.first.lengths == [30, 10]
    assert mixed.batch_size == 4
    # A part of what is there changes just that.
    assert built("config=several", "data.test.a.batch_size=3").task.test_data["a"].batch_size == 3
    collate = "{_target_: torch.utils.data.default_collate}"
    assert built("config=one", f"data.test.collate={collate}").task.test_data["test"].collate


# --- batch sizes by epoch ---


def test_batch_sizes_by_epoch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config=one", "data.train.batch_size={1: 4, 2: 8, 3: 20}", "run.dir=runs/x"]
    made = built(*words)
    assert made.task.train_data.sizes == {1: 4, 2: 8, 3: 20}
    assert run_here([*words, "plan=true"]) == DONE
    text = capsys.readouterr().out
    assert "3 epochs of 10, 5 from epoch 2, 2 from epoch 3 updates: 17 updates" in text
    assert "from epoch 3: 20 samples" in text
    assert run_here(words) == DONE
    assert "17 updates in 3 epochs of 10, 5 from epoch 2, 2 from epoch 3" in capsys.readouterr().out
    assert run_here([*words, "phases.epochs=4"]) == DONE  # goes on with 20
    assert json.loads(Path("runs/x/status.json").read_text())["updates"] == 19
    changed = ["config=one", "run.dir=runs/x", "data.train.batch_size=4", "phases.epochs=5"]
    assert run_here(changed) == WRONG_CONFIG
    assert "data.train.batch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{2: 4}", "data.train.batch_size: .*begin with epoch 1"),
        ("{1: 4, 3: 0}", "data.train.batch_size.3: 0 is less than 1"),
        ("{1: 4, 0: 3}", "data.train.batch_size: epoch 0"),
        ("{1: four}", "data.train.batch_size"),
        ("{one: 4}", "data.train.batch_size"),
        ("4.5", "data.train.batch_size: 4.5"),
    ],
)
def test_mistakes_in_batch_sizes(
    here: Path, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, refused(capsys, "config=one", f"data.train.batch_size={value}"))


# --- mixes ---


def test_a_mix_by_weights(here: Path) -> None:
    made = built("config=mixed", "data.train.epoch_samples=60", "data.train.mix.b.limit=0.5",
                 "phases.epochs=1")  # fmt: skip
    seen = watch("on_step", lambda task: task.batch.sources if task.train else None)
    train(made, seen=seen)
    mix = made.task.train_data.first
    assert isinstance(mix, Mix)
    assert (mix.names, mix.weights, mix.lengths) == (["a", "b"], [2.0, 1.0], [30, 5])
    sources = torch.cat([s for s in seen.seen if s is not None])
    assert sources.numel() == 60
    assert set(sources.tolist()) == {0, 1}


MIX = "config=mixed"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([MIX, "data.train.mix.a.weight=0"], "data.train.mix.a.weight: 0"),
        ([MIX, "data.train.mix.a.wieght=1"], "data.train.mix.a.wieght: .*'weight'"),
        ([MIX, "data.train.mix.a.dataset.name=tiny"], "data.train.mix.a.dataset.name: .*tiny_data"),
        ([MIX, "data.train.mix.a.limit=-1"], "data.train.mix.a.limit: -1"),
        ([MIX, "data.train.limit=5"], "data.train.limit: .*mix.NAME.limit"),
        ([MIX, "data.train.sampler={name: weighted}"], "data.train.sampler: .*by its weights"),
        ([MIX, "data.train.epoch_samples=0"], "data.train.epoch_samples: 0"),
        ([MIX, "data.train.mix={a: null, b: null}"], "data.train.mix: there is no source"),
        (["config=one", "~data.train.dataset"], "data.train.dataset: give a dataset, or a mix"),
        (["config=one", "data.train.epoch_samples=5"], "data.train.epoch_samples: .*of a mix"),
    ],
    ids=str,
)
def test_mistakes_in_a_mix(
    here: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, refused(capsys, *words))


# --- samplers and limits ---


def by_sign(dataset: Any, above: float = 0.0) -> Any:
    """A class for each sample: whether its first number is above something."""
    return (dataset.inputs[:, 0] > above).tolist()


@register_sampler("test_data_last", by="targets", replace=True)
def last_ones(values: Any, seed: int, epoch: int, count: int = 3) -> Tensor:
    """The last few samples, moved on by the epoch."""
    return (torch.arange(len(values) - count, len(values)) + epoch) % len(values)


@pytest.mark.parametrize(
    ("sampler", "samples"),
    [
        ("{name: balanced}", 40),
        ("{name: balanced, per_class: 6}", 12),
        ("{name: balanced, by: {_target_: tests.config.test_data.by_sign, above: 0.5}}", 40),
        ("{name: test_data_last, count: 5}", 5),
        ("{_target_: tests.config.test_data.last_ones}", 3),
    ],
)
def test_samplers(here: Path, sampler: str, samples: int) -> None:
    made = built("config=one", f"data.train.sampler={sampler}", "phases.epochs=1")
    train(made)
    assert made.task.loaders["train"].samples == samples
    assert made.task.progress.samples == samples


def test_a_sampler_draws_from_what_a_limit_leaves(here: Path) -> None:
    made = built("config=one", "data.train.sampler={name: balanced, per_class: 9}",
                 "data.train.limit=6", "phases.epochs=1")  # fmt: skip
    seen = watch("on_step", lambda task: task.batch.indices if task.train else None)
    train(made, seen=seen)
    drawn = torch.cat([s for s in seen.seen if s is not None])
    assert len(drawn) == 18
    assert len(set(drawn.tolist())) == 6


def test_limits(here: Path) -> None:
    made = built("config=one", "data.train.limit=0.5", "data.test.limit=3", "phases.epochs=1")
    train(made)
    assert made.task.loaders["train"].samples == 20
    assert made.task.loaders["test"].samples == 3


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data.train.sampler={name: balancd}", "data.train.sampler.name: .*'balanced'"),
        ("data.train.sampler={name: balanced, per_clas: 3}", "sampler.per_clas: .*'per_class'"),
        ("data.train.sampler={name: balanced, labels: [1]}", "sampler.labels"),
        ("data.train.sampler={name: balanced, by: 3}", "data.train.sampler.by: 3"),
        ("data.train.sampler={name: test_data_last, cont: 3}", "sampler.cont: .*'count'"),
        ("data.train.sampler={name: test_data_last, seed: 3}", "sampler.seed"),
        ("data.train.limit=0", "data.train.limit: 0"),
        ("data.train.limit=1.5", "data.train.limit: 1.5"),
        ("data.test.limit=-0.5", "data.test.limit: -0.5"),
        ("data.train.limit=half", "data.train.limit"),
    ],
)
def test_mistakes_in_samplers_and_limits(
    here: Path, word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, refused(capsys, "config=one", word))


def test_a_sampler_excludes_an_order_of_the_datasets_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["config=one", "data.train.sampler={name: balanced}", "data.train.shuffle=false"]
    assert "data.train.shuffle: data.train.sampler says" in refused(capsys, *words)


# --- what is done to a batch ---


@register_batch_transform("test_data_scale", replace=True)
def scale(batch: Any, factor: float) -> Any:
    """Inputs times a factor."""
    return batch[0] * factor, batch[1]


class Twice:
    """A transform, or a way to the device, as an object."""

    def __init__(self, times: int = 2) -> None:
        self.times = times

    def __call__(self, batch: Any, device: Any = None) -> Any:
        return batch[0] * self.times, batch[1]


@register_to_device("test_data_half", replace=True)
def halved(batch: Any, device: torch.device, by: float = 2.0) -> Any:
    """Inputs over a number, on the device."""
    return batch[0].to(device) / by, batch[1].to(device)


def first_input(*words: str) -> Tensor:
    made = built("config=one", "phases.updates=1", *words)
    seen = watch("on_forward", lambda task: task.batch.input.clone())
    train(made, seen=seen)
    return seen.seen[0]


def test_transforms_and_ways_to_the_device(here: Path) -> None:
    plain = first_input()
    for words, factor in (
        (["data.train.batch_transform={name: test_data_scale, factor: 3.0}"], 3.0),
        ([f"data.train.batch_transform={{_target_: {HERE}.Twice, times: 5}}"], 5.0),
        (["data.train.to_device={name: test_data_half}"], 0.5),
        ([f"data.train.to_device={{_target_: {HERE}.halved, by: 4.0}}"], 0.25),
        ([f"data.train.to_device={{_target_: {HERE}.Twice}}"], 2.0),
    ):
        torch.testing.assert_close(first_input(*words), plain * factor)


def test_mixup(here: Path) -> None:
    made = built("config=one", "phases.epochs=1",
                 "data.train.batch_transform={name: mixup, classes: 2, alpha: 0.5}")  # fmt: skip
    seen = watch("on_step", lambda task: (task.train, task.batch.target.dim()))
    train(made, seen=seen)
    assert set(seen.seen) == {(True, 2), (False, 1)}


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data.train.batch_transform={name: mixupp}", "batch_transform.name: .*'mixup'"),
        ("data.train.batch_transform={name: mixup, clases: 3}", "batch_transform.clases"),
        ("data.train.batch_transform={name: mixup, classes: 2, alpha: 0.0}", "transform.alpha: 0"),
        ("data.train.batch_transform={name: test_data_scale}", "batch_transform.factor"),
        ("data.test.batch_transform={name: mixup}", "data.test.batch_transform: there is no such"),
        ("data.train.to_device={name: nothing}", "to_device.name: no to_device function"),
        ("data.train.to_device={name: test_data_half, bye: 1.0}", "to_device.bye: .*'by'"),
    ],
)
def test_mistakes_in_transforms(
    here: Path, word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, refused(capsys, "config=one", word))


# --- rebuilding ---

MADE: list[int | None] = []


@register_dataset("test_data_rebuilt", replace=True)
class Rebuilt(Dataset[Any]):
    """Its inputs say for which epoch it was made."""

    def __init__(self, epoch: int | None = None, growing: bool = False, samples: int = 8) -> None:
        MADE.append(epoch)
        self.samples = samples + (epoch or 0 if growing else 0)
        self.noise = torch.rand(())
        self.epoch = epoch or 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(self.epoch)) + 0 * self.noise, torch.tensor(index % 2)


REBUILT = ["config=one", "data.train.dataset={name: test_data_rebuilt}", "phases.epochs=5",
           "data.train.rebuild_every=2"]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_made_again(here: Path, workers: int) -> None:
    MADE.clear()
    made = built(*REBUILT, f"data.train.workers={workers}")
    seen = watch(
        "on_forward",
        lambda task: (task.progress.epoch, int(task.batch.input[0, 0])) if task.train else None,
    )
    train(made, seen=seen)
    assert sorted(set(seen.seen) - {None}) == [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5)]
    assert MADE == [1, 3, 5]


def test_sources_of_a_mix_are_made_again_too(here: Path) -> None:
    MADE.clear()
    made = built(
        "config=mixed", "data.train.mix.b.dataset={name: test_data_rebuilt, samples: 6}",
        "data.train.rebuild_every=1", "phases.epochs=2",
    )  # fmt: skip
    train(made)
    assert MADE == [1, 2]


def test_a_dataset_without_an_epoch_is_just_made_again(here: Path) -> None:
    made = built("config=one", "data.train.rebuild_every=1", "phases.epochs=3")
    first = weakref.ref(made.task.train_data.first)
    again = watch("on_step", lambda task: first() is None if task.train else None)
    train(made, again=again)
    # Gone when the second epoch has begun to read: two are never in memory.
    assert [gone for gone in again.seen if gone is not None] == [False] * 10 + [True] * 20


def test_an_epoch_that_is_given_stays(here: Path) -> None:
    MADE.clear()
    train(built(*REBUILT, "data.train.dataset.epoch=7"))
    assert MADE == [7, 7, 7]


def test_a_dataset_of_another_length_is_an_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here([*REBUILT, "data.train.dataset.growing=true"]) == 1
    text = capsys.readouterr().err
    assert "data.train.rebuild_every: the dataset of epoch 3 has 11 samples" in text
    assert "that of epoch 1 has 9" in text


# --- debug ---


def test_debug_fast_makes_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config=several", "debug.fast=2", "hooks={tensorboard: {}, curves: {}}",
             "schedule={name: cosine, warmup: {updates: 20}}", "run.log_every=1"]  # fmt: skip
    before = sorted(here.rglob("*"))
    assert run_here(words) == DONE
    assert sorted(here.rglob("*")) == before
    text = capsys.readouterr().out
    assert "debug.fast: 2 batches of each phase, one epoch" in text
    assert "run folder  none: nothing is saved" in text
    assert "2 updates in 1 epoch of 2" in text


def test_debug_fast_counts_every_phase(here: Path) -> None:
    made = built("config=several", "debug.fast=2", "phases={updates: 500, epochs: null}")
    steps = watch("on_step", lambda task: task.phase.name)
    outcome = train(made, steps=steps)
    assert steps.seen == ["train"] * 2 + ["a"] * 2 + ["b"] * 2
    assert outcome.updates == 2
    assert outcome.status == "finished"
    # More than there is: all of it.
    made = built("config=several", "debug.fast=99")
    steps = watch("on_step", lambda task: task.phase.name)
    train(made, steps=steps)
    assert steps.seen == ["train"] * 10 + ["a"] * 3 + ["b"] * 2


def test_debug_fast_uses_the_rates_of_the_whole_training(here: Path) -> None:
    def rates(*words: str) -> list[float]:
        made = built("config=one", "schedule={name: cosine, warmup: {updates: 5}}",
                     "phases.epochs=3", *words)  # fmt: skip
        seen = watch("on_update", lambda task: task.optimizers["optimizer"].param_groups[0]["lr"])
        train(made, seen=seen)
        return seen.seen

    assert rates("debug.fast=4") == rates()[:4]


def test_debug_overfit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = built("config=one", "debug.overfit=2", "data.train.batch_size={1: 4, 2: 8}")
    seen = watch("on_forward", lambda task: task.batch.input.clone() if task.train else None)
    outcome = train(made, seen=seen)
    inputs = [x for x in seen.seen if x is not None]
    assert outcome.updates == len(inputs) == 2 * 3
    for number, x in enumerate(inputs):
        assert torch.equal(x, inputs[number % 2])  # to the bit, its noise included
    assert not torch.equal(inputs[0], inputs[1])


def test_debug_overfit_is_another_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config=one", "run.dir=runs/x"]
    assert run_here([*words, "phases.epochs=1", "debug.overfit=2"]) == DONE
    assert run_here([*words, "phases.epochs=2"]) == WRONG_CONFIG
    assert "debug.overfit: 2 -> None" in capsys.readouterr().err
    assert run_here([*words, "debug.fast=1"]) == DONE  # it does not look into the folder


@pytest.mark.parametrize(
    ("word", "says"),
    [("debug.fast=0", "debug.fast: 0"), ("debug.overfit=-1", "debug.overfit: -1"),
     ("debug={fast: 1, overfit: 1}", "debug.overfit: give fast or overfit"),
     ("debug.fats=1", "debug.fats: .*'fast'")],
)  # fmt: skip
def test_mistakes_in_debug(
    here: Path, word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, refused(capsys, "config=one", word))


def test_errors_carry_their_key(here: Path) -> None:
    with pytest.raises(ConfigError) as error:
        built("config=mixed", "data.train.mix.a.weight=-1")
    assert error.value.key == "data.train.mix.a.weight"


# --- augmentation ---


@register_augmentation("test_data_add", replace=True)
class Add:
    def __init__(self, what: float) -> None:
        self.what = what

    def __call__(self, images: torch.Tensor, draws: Any) -> torch.Tensor:
        return images + self.what


@register_augmentation("test_data_times", replace=True)
def times(images: torch.Tensor, draws: Any, factor: float = 2.0) -> torch.Tensor:
    return images * factor


def test_augmentations_stand_in_their_order_and_may_be_left_out(here: Path) -> None:
    plain = first_input()
    given = "data.train.augment={test_data_add: {what: 1.0}, more: {name: test_data_times}}"
    torch.testing.assert_close(first_input(given), (plain + 1) * 2)
    words = [given, "data.train.augment.more.factor=3.0", "data.train.augment.test_data_add=null"]
    torch.testing.assert_close(first_input(*words), plain * 3)
    target = f"data.train.augment.x={{_target_: {HERE}.Add, what: 2.0}}"
    torch.testing.assert_close(first_input(target), plain + 2)


def test_tests_are_not_augmented(here: Path) -> None:
    def tested(*words: str) -> Tensor:
        seen = watch("on_forward", lambda task: None if task.train else task.batch.input.clone())
        train(built("config=one", "phases.updates=1", *words), seen=seen)
        return torch.cat([x for x in seen.seen if x is not None])

    assert torch.equal(tested("data.train.augment.test_data_add.what=1.0"), tested())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data.train.augment.blurr.sigma=1", "augment.blurr: no augmentation .*'blur'"),
        (
            "data.train.augment.flip.probabilty=0.5",
            r"data\.train\.augment\.flip\.probabilty: .*'probability'",
        ),
        ("data.train.augment.flip.probability=2.0", "augment.flip: .*probability is 2"),
        ("data.train.augment=flip", "data.train.augment: "),
        ("data.train.augment.test_data_add={}", "augment.test_data_add.what"),
        ("data.train.views=0", "data.train.views: 0 is less than 1"),
        ("data.test.augment.flip={}", "data.test.augment: there is no such"),
        ("data.test.views=2", "data.test.views: there is no such"),
    ],
)
def test_mistakes_in_augmentations(
    here: Path, word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(says, refused(capsys, "config=one", word))
