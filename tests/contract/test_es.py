"""ES: early stopping and best-keeping. What is best, when it ends, and what of it survives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phaseloop import (
    Accuracy,
    ConfigError,
    Data,
    Hook,
    MetricError,
    Outcome,
    Phases,
    Run,
    Task,
)
from phaseloop.engine.checkpoint import store
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.console import Console
from phaseloop.hooks.early_stop import EarlyStop
from phaseloop.hooks.meter_sync import MeterSync
from tests.rigs.probes import Break, Scripted
from tests.rigs.r0 import numbers, r0, train

NAN = math.nan


def scored(
    scores: Sequence[float],
    folder: Path | None = None,
    *,
    higher: bool | None = False,
    epochs: int | None = None,
    **phases: Any,
) -> Task:
    """R0, one update an epoch, whose test reports ``scores`` as ``test/score``."""
    return r0(
        [1],
        1,
        test=Data(numbers([1]), 1),
        test_meters={"score": Scripted(scores, higher)},
        phases=Phases(epochs=len(scores) if epochs is None else epochs, **phases),
        run=Run(str(folder) if folder else None),
    )


def stop_early(patience: int, **options: Any) -> EarlyStop:
    return EarlyStop("test/score", patience, **options)


class BreakAfterTest(Hook):
    """Raises after the n-th test, when the checkpoint of that moment is written."""

    order = Checkpoint.order
    saves = True  # it does not, but has to come after what does

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_phase_end(self, task: Task) -> None:
        if not task.train and task.progress.epoch == self.epoch:
            raise Break


def run(task: Task, **hooks: Hook) -> Outcome:
    """Train with meters read at each phase's end, and these hooks."""
    return train(task, meter_sync=MeterSync(), **hooks)


def kept(folder: Path) -> dict[int, dict[str, Any]]:
    """Update (here: epoch) to the state of the last save at it, of the checkpoints on disk."""
    checkpoints = store.Store(folder / "checkpoints")
    return {
        saved.position[0]: store.load(saved, "state.pt")
        for saved in reversed(list(checkpoints.whole()))
    }


SCORES = [1.0, 1.1, 1.2, 1.3, 1.4]


def test_es_a_stops_when_patience_is_used_up() -> None:
    outcome = run(scored(SCORES), stop=stop_early(3))
    assert outcome.updates == 4
    assert outcome.status == "stopped"
    assert "early_stop" in outcome.reason
    assert "test/score" in outcome.reason


@pytest.mark.parametrize("after", [1, 2, 3])
def test_es_a_interrupted_and_resumed_it_stops_at_the_same_score(
    tmp_path: Path, after: int
) -> None:
    hooks = {"save": Checkpoint(), "broken_off": BreakAfterTest(after)}
    with pytest.raises(Break):
        run(scored(SCORES, tmp_path), stop=stop_early(3), **hooks)
    task = scored(SCORES, tmp_path)
    stop = stop_early(3)
    outcome = run(task, stop=stop, save=Checkpoint())
    assert task.resumed
    assert outcome.updates == 4
    assert (stop.best, stop.waited) == (1.0, 3)


def test_es_a_a_least_improvement_is_asked_for() -> None:
    # Each score is better by .1, which is less than .15, than the best so far or than .3 ago.
    scores = [1.0, 0.9, 0.8, 0.7, 0.6]
    assert run(scored(scores), stop=stop_early(1, min_delta=0.15)).updates == 2
    assert run(scored(scores), stop=stop_early(2, min_delta=0.15)).updates == 5


def test_es_b_a_checkpoint_knows_the_best_that_it_is_itself(tmp_path: Path) -> None:
    def hooks() -> dict[str, Hook]:
        return {"save": Checkpoint(keep_best=1, metric="test/score"), "stop": stop_early(9)}

    scores = [0.9, 0.5, 0.3]
    run(scored(scores, tmp_path, epochs=2), **hooks())
    states = kept(tmp_path)
    assert set(states) == {2}  # the newest is the best
    ((score, epoch, update, name),) = states[2]["hooks"]["save"]["best"]
    assert (score, epoch, update) == (0.5, 2, 2)
    assert (tmp_path / "checkpoints" / name).is_dir()
    assert states[2]["hooks"]["stop"]["best"] == 0.5
    assert states[2]["best"]["test/score"] == 0.5

    run(scored(scores, tmp_path, epochs=3), **hooks())
    states = kept(tmp_path)
    assert set(states) == {3}  # one best is left, and it is the newest too
    assert states[3]["hooks"]["save"]["best"][0][:3] == [0.3, 3, 3]


def test_es_b_the_best_stays_when_newer_ones_are_worse(tmp_path: Path) -> None:
    task = scored([0.9, 0.5, 0.6, 0.7], tmp_path)
    run(task, save=Checkpoint(keep_best=1, metric="test/score"))
    assert set(kept(tmp_path)) == {2, 4}


def test_es_c_a_stopped_run_stays_stopped_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(scored(SCORES, tmp_path), save=Checkpoint(), stop=stop_early(3))
    before = store.load(next(store.Store(tmp_path / "checkpoints").whole()), "model.pt")
    caplog.clear()
    task = scored(SCORES, tmp_path)
    outcome = run(task, save=Checkpoint(), stop=stop_early(3), console=Console())
    assert outcome.updates == 4
    assert outcome.status == "stopped"
    assert "early_stop" in outcome.reason
    assert task.bare_model.w == before["w"]
    assert any("early_stop" in r.getMessage() for r in caplog.records)


def test_es_c_with_more_patience_it_goes_on(tmp_path: Path) -> None:
    run(scored(SCORES, tmp_path), save=Checkpoint(), stop=stop_early(3))
    outcome = run(scored(SCORES, tmp_path), save=Checkpoint(), stop=stop_early(4))
    assert outcome.updates == 5
    assert outcome.status == "stopped"
    scores = [*SCORES[:4], 0.5, 0.6]
    outcome = run(scored(scores, tmp_path), save=Checkpoint(), stop=stop_early(9))
    assert outcome.updates == 6
    assert outcome.status == "finished"


def test_es_d_nan_is_never_best(tmp_path: Path) -> None:
    stop = stop_early(9)
    save = Checkpoint(keep_best=1, metric="test/score")
    outcome = run(scored([NAN, 0.5, 0.6, NAN, 0.4], tmp_path), stop=stop, save=save)
    assert stop.best == 0.4
    assert stop.waited == 0
    assert save.best[0][:2] == [0.4, 5]
    assert outcome.best["test/score"] == 0.4


def test_es_d_nan_counts_as_no_improvement() -> None:
    assert run(scored([0.5, NAN, NAN, 0.4]), stop=stop_early(2)).updates == 3
    assert run(scored([NAN, NAN, NAN, NAN]), stop=stop_early(3)).updates == 3


@pytest.mark.parametrize(
    ("scores", "higher"), [([0.5, 0.0, 0.1], False), ([-1.0, 0.0, -2.0], True)]
)
def test_es_d_zero_is_a_score(tmp_path: Path, scores: list[float], higher: bool) -> None:
    stop = stop_early(9)
    save = Checkpoint(keep_best=1, metric="test/score")
    outcome = run(scored(scores, tmp_path, higher=higher), stop=stop, save=save)
    assert (stop.best, stop.waited) == (0.0, 1)
    assert save.best[0][:2] == [0.0, 2]
    assert outcome.best["test/score"] == 0.0


@pytest.mark.parametrize("mode", ["min", None])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["early_stop", "checkpoint"])
def test_es_e_an_unknown_metric_is_an_error_before_the_second_epoch(
    tmp_path: Path, kind: str, every: int, mode: str | None
) -> None:
    hook = (
        EarlyStop("test/scores", 3, mode=mode)
        if kind == "early_stop"
        else Checkpoint(keep_best=1, metric="test/scores", mode=mode)
    )
    task = scored(SCORES, tmp_path, test_every_epochs=every)
    with pytest.raises((ConfigError, MetricError)) as error:
        run(task, hook=hook)
    assert task.progress.epoch <= 1
    assert f"hooks.{kind}.metric" in str(error.value)
    assert "test/scores" in str(error.value)
    assert "Did you mean 'test/score'?" in str(error.value)
    assert "test/loss" in str(error.value)


def test_es_e_an_unknown_phase_is_an_error_at_the_start() -> None:
    task = scored(SCORES)
    with pytest.raises(ConfigError, match=r"tset/score.*test, train") as error:
        run(task, stop=EarlyStop("tset/score", 3, mode="min"))
    assert error.value.key == "hooks.early_stop.metric"
    assert task.progress.epoch == 0


@pytest.mark.parametrize("given", ["min", "max"])
def test_es_f_a_given_direction_is_taken(given: str) -> None:
    stop = stop_early(9, mode=given)
    run(scored([0.2, 0.3, 0.1], higher=None), stop=stop)
    assert stop.best == {"min": 0.1, "max": 0.3}[given]


@pytest.mark.parametrize("higher", [True, False])
def test_es_f_else_that_of_the_metric(higher: bool) -> None:
    stop = stop_early(9)
    run(scored([0.2, 0.3, 0.1], higher=higher), stop=stop)
    assert stop.best == (0.3 if higher else 0.1)


def test_es_f_without_either_the_configuration_is_wrong() -> None:
    task = scored([0.2, 0.3, 0.1], higher=None)
    with pytest.raises(ConfigError, match="give max or min") as error:
        run(task, stop=stop_early(9))
    assert error.value.key == "hooks.early_stop.mode"
    assert task.progress.epoch == 0
    with pytest.raises(ConfigError, match="'max' or 'min'"):
        stop_early(9, mode="highest")


def test_es_f_built_in_metrics_know_their_direction() -> None:
    task = r0(
        [1], 1, test=Data(numbers([1]), 1), test_meters={"accuracy": Accuracy()},
        train_meters={"accuracy": Accuracy()},
    )  # fmt: skip
    assert task.direction("test/accuracy") is True
    assert task.direction("train/accuracy") is True
    assert task.direction("test/loss") is False
    assert task.direction("train/loss") is False


@pytest.mark.parametrize(
    ("higher", "scores"), [(True, [0.1, 0.2, 0.3, 0.2, 0.3]), (False, [0.9, 0.8, 0.7, 0.8, 0.7])]
)
def test_es_f_the_first_of_equals_stays_best(
    tmp_path: Path, higher: bool, scores: list[float]
) -> None:
    stop = stop_early(9)
    save = Checkpoint(keep_best=2, metric="test/score")
    run(scored(scores, tmp_path, higher=higher), save=save, stop=stop)
    assert [entry[1] for entry in save.best] == [3, 5]
    assert stop.waited == 2  # the equal score of epoch 5 was no improvement
    assert set(kept(tmp_path)) == {3, 5}


def test_es_g_a_stop_before_the_minimum_is_forgotten_if_the_score_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Patience 1 is used up at epoch 2, the minimum is 3, and epoch 3 is better again.
    outcome = run(scored([1.0, 1.1, 0.5, 0.4, 0.6], min_epochs=3), stop=stop_early(1))
    assert outcome.updates == 5
    assert any("min_epochs" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("minimum", [{"min_epochs": 4}, {"min_updates": 4}])
def test_es_g_and_made_again_if_it_does_not(minimum: dict[str, int]) -> None:
    outcome = run(scored(SCORES, **minimum), stop=stop_early(1))
    assert outcome.updates == 4
    assert outcome.status == "stopped"


def test_es_g_over_a_resume(tmp_path: Path) -> None:
    scores = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    hooks = {"save": Checkpoint(), "broken_off": BreakAfterTest(3)}
    with pytest.raises(Break):
        run(scored(scores, tmp_path, min_epochs=5), stop=stop_early(1), **hooks)
    outcome = run(scored(scores, tmp_path, min_epochs=5), stop=stop_early(1), save=Checkpoint())
    assert outcome.updates == 5
