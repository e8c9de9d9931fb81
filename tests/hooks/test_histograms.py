"""Hook ``histograms``: which tensors, as they are when, at which updates; on several processes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phaseloop import ConfigError, Gradients, Hook, Precision, Trainer
from phaseloop.engine import shown
from phaseloop.hooks.histograms import Histograms
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import events, process, r1, ranks, sharded


class Seen(Hook):
    """What the gradients and the weights were: for each update, sums of their squares."""

    def __init__(self) -> None:
        self.gradients: dict[int, float] = {}
        self.weights: dict[int, float] = {}

    def on_gradients(self, task: Any) -> None:
        grad = next(task.bare_model.parameters()).grad
        self.gradients[task.progress.updates + 1] = float(grad.double().square().sum())

    def on_step(self, task: Any) -> None:
        weight: Tensor = next(task.bare_model.parameters()).detach()
        self.weights[task.progress.updates] = float(weight.double().square().sum())


def squares(folder: Path, tag: str) -> dict[int, float]:
    """Update to the sum of the squares of a histogram's values."""
    found = events.everything(folder)[tag]
    assert len(dict(found)) == len(found)
    return {step: value.sum_squares for step, value in found}


def names(folder: Path, kind: str) -> set[str]:
    prefix = f"{kind}/"
    return {t.removeprefix(prefix) for t in events.everything(folder) if t.startswith(prefix)}


def run(folder: Path, task: Any = None, **hooks: Hook) -> None:
    task = task or r1.make_task(folder, epochs=2)
    Trainer(task, r1.make_hooks(tensorboard=TensorBoard(), **hooks)).train()


def test_gradients_before_clipping_and_weights_after_the_update(tmp_path: Path) -> None:
    seen = Seen()
    task = r1.make_task(tmp_path, epochs=2, gradients=Gradients(clip_norm=1e-3))
    run(tmp_path, task, seen=seen, histograms=Histograms(every_updates=3, every_epochs=None))
    chosen = range(3, 21, 3)
    gradients, weights = (
        squares(tmp_path, "gradients/0.weight"),
        squares(tmp_path, "weights/0.weight"),
    )
    assert gradients == pytest.approx({k: seen.gradients[k] for k in chosen})
    assert weights == pytest.approx({k: seen.weights[k] for k in chosen})
    every = {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert names(tmp_path, "gradients") == names(tmp_path, "weights") == every


def test_the_first_update_of_each_epoch_by_default(tmp_path: Path) -> None:
    run(tmp_path, histograms=Histograms())
    assert list(squares(tmp_path, "weights/0.weight")) == [1, 11]


def test_chosen_parameters_of_every_other_epoch(tmp_path: Path) -> None:
    hook = Histograms(every_epochs=2, parameters=["3", "*.weight"], gradients=False)
    run(tmp_path, r1.make_task(tmp_path, epochs=4), histograms=hook)
    assert list(squares(tmp_path, "weights/0.weight")) == [1, 21]
    assert names(tmp_path, "weights") == {"0.weight", "3.weight", "3.bias"}
    assert names(tmp_path, "gradients") == set()


class SkipFirst(Hook):
    """Leaves out the first two windows."""

    def on_gradients(self, task: Any) -> None:
        if task.progress.windows < 2:
            task.skip_update("asked for by the test")


def test_an_update_that_is_left_out_has_none_and_the_next_is_taken(tmp_path: Path) -> None:
    seen = Seen()
    run(tmp_path, histograms=Histograms(), skip=SkipFirst(), seen=seen)
    found = squares(tmp_path, "gradients/0.weight")
    assert list(found) == list(squares(tmp_path, "weights/0.weight")) == [1, 9]
    assert found == pytest.approx({1: seen.gradients[1], 9: seen.gradients[9]})


def test_nothing_is_counted_between_chosen_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, count = [], shown.histograms.histogram_of
    monkeypatch.setattr(
        shown.histograms, "histogram_of", lambda tensor: counted.append(1) or count(tensor)
    )
    run(tmp_path, histograms=Histograms(every_updates=10, every_epochs=None))
    assert len(counted) == 2 * 2 * 4  # at updates 10 and 20, gradients and weights, 4 parameters


def test_with_float16_gradients_are_without_the_loss_scale(tmp_path: Path) -> None:
    found = {}
    for precision in ("float32", Precision("float16")):
        name = str(getattr(precision, "dtype", precision))
        task = r1.make_task(tmp_path / name, epochs=1, precision=precision)
        run(tmp_path / name, task, histograms=Histograms())
        found[name] = squares(tmp_path / name, "gradients/0.weight")[1]
    single, half = found.values()
    assert half == pytest.approx(single, rel=0.05)  # and not 65536 ** 2 times as much


EVERY_4 = {"every_epochs": None, "every_updates": 4}


def train(folder: Path, at: Any = None, **options: Any) -> Any:
    hooks = {
        "tensorboard": TensorBoard(),
        "histograms": Histograms(every_updates=5),
        "skip": r1.SkipSome(),
        **({} if at is None else {"at": at}),
    }
    return process.run(r1.train, folder, save=EVERY_4, hooks=hooks, epochs=3, **options)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("histograms") / "run"
    assert train(folder).code == 0
    return folder


@pytest.mark.parametrize("at", [3, 6, 9, 14])
def test_killed_and_resumed_each_is_there_once(undisturbed: Path, tmp_path: Path, at: int) -> None:
    assert train(tmp_path / "run", r1.At("on_update", at)).code == -signal.SIGKILL
    assert train(tmp_path / "run").code == 0
    whole = events.everything(undisturbed)
    assert [step for step, _ in whole["weights/0.bias"]] == [1, 5, 9, 10, 15, 17, 20]
    assert events.everything(tmp_path / "run") == whole


def spread(folder: Path, **options: Any) -> None:
    hooks = {"tensorboard": TensorBoard(), "histograms": Histograms(every_updates=2)}
    sharded.train(folder, hooks=hooks, **options)


@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_of_several_processes_they_are_those_of_the_whole(tmp_path: Path, backend: str) -> None:
    process.result(spread, tmp_path / "one")
    ranks.results(spread, tmp_path / "two", backend=backend)
    one, two = events.everything(tmp_path / "one"), events.everything(tmp_path / "two")
    tags = [tag for tag in one if tag.startswith(("weights/", "gradients/"))]
    assert "weights/one" in tags and "gradients/blocks.1.0.weight" in tags
    for tag in tags:
        for (a_step, a), (b_step, b) in zip(one[tag], two[tag], strict=True):
            assert (a_step, a.num, a.bucket) == (b_step, b.num, b.bucket)
            for field in ("min", "max", "sum", "sum_squares"):
                wanted = pytest.approx(getattr(a, field), rel=1e-9, abs=1e-12)
                assert getattr(b, field) == wanted, f"{tag} {field}"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"every_updates": 0}, "every_updates: 0 is below 1"),
        ({"every_epochs": -1}, "every_epochs: -1 is below 1"),
        ({"every_epochs": None}, "every_updates: it and every_epochs are null"),
        ({"weights": False, "gradients": False}, "weights: it and gradients"),
    ],
)
def test_options_that_record_nothing_are_refused(options: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"hooks\.histograms\.{key}"):
        Histograms(**options)


def test_a_pattern_that_matches_nothing_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.spread\.parameters.*'4\.weight'"):
        run(tmp_path, spread=Histograms(parameters=["4.weight"]))


def test_it_changes_nothing_of_the_training(tmp_path: Path) -> None:
    weights = []
    for hooks in ({}, {"histograms": Histograms(every_updates=1)}):
        task = r1.make_task(tmp_path / str(len(weights)), epochs=1)
        run(tmp_path / str(len(weights)), task, **hooks)
        weights.append(torch.cat([p.detach().flatten() for p in task.bare_model.parameters()]))
    assert torch.equal(*weights)
