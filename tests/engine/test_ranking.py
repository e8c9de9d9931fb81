"""Ranking: which score is better, where the direction comes from, and what is an error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from phaseloop import Accuracy, ConfigError, Data, MetricError, Phases, Task, TensorData
from phaseloop.engine.phases import Phase
from phaseloop.engine.ranking import Ranking

SCORES = st.floats(allow_nan=True, allow_infinity=True)


def task() -> Task:
    model = nn.Linear(1, 2)
    return Task(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=Data(TensorData(torch.ones(2, 1), torch.ones(2)), 1),
        test=Data(TensorData(torch.ones(2, 1), torch.ones(2)), 1),
        test_meters={
            "accuracy": Accuracy(),
            "mean": MeanMetric(),
            "both": MetricCollection({"top": MulticlassAccuracy(2), "mean": MeanMetric()}),
        },
        phases=Phases(epochs=1),
    )


def ranking(metric: str = "test/accuracy", mode: str | None = None, delta: float = 0.0) -> Ranking:
    made = Ranking("hooks.mine", metric, mode, delta)
    made.resolve(task())
    return made


@given(SCORES, SCORES)
def test_up_and_down_are_mirror_images(score: float, than: float) -> None:
    up, down = Ranking("k", "test/m", "max"), Ranking("k", "test/m", "min")
    assert up.better(score, than) == down.better(-score, -than)


@given(SCORES, SCORES)
def test_better_is_strict(score: float, than: float) -> None:
    rank = Ranking("k", "test/m", "max")
    assert not rank.better(score, score) or math.isnan(score)
    if not math.isnan(score) and not math.isnan(than):
        assert rank.better(score, than) == (score > than)
        assert not (rank.better(score, than) and rank.better(than, score))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1.0, math.inf, -math.inf])
def test_nan_beats_nothing_and_anything_beats_nan(mode: str, value: float) -> None:
    rank = Ranking("k", "test/m", mode)
    assert not rank.better(math.nan, value)
    assert rank.better(value, math.nan)
    assert not rank.better(math.nan, math.nan)


def test_a_least_gain() -> None:
    rank = Ranking("k", "test/m", "max", 0.25)
    assert not rank.better(1.25, 1.0)
    assert rank.better(1.5, 1.0)
    assert not Ranking("k", "test/m", "min", 0.25).better(0.75, 1.0)
    assert Ranking("k", "test/m", "min", 0.25).better(0.5, 1.0)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("test/accuracy", "max"),
        ("test/loss", "min"),
        ("train/loss", "min"),
        ("test/both/top", "max"),
    ],
)
def test_the_direction_is_that_of_the_metric(metric: str, mode: str) -> None:
    assert ranking(metric).mode == mode


def test_a_given_direction_comes_first() -> None:
    assert ranking("test/accuracy", "min").mode == "min"
    assert ranking("test/mean", "max").mode == "max"


@pytest.mark.parametrize("metric", ["test/mean", "test/both/mean"])
def test_a_direction_that_nobody_knows_is_an_error(metric: str) -> None:
    with pytest.raises(ConfigError, match="give max or min") as error:
        ranking(metric)
    assert error.value.key == "hooks.mine.mode"


@pytest.mark.parametrize("mode", ["min", None])
@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("tests/accuracy", r"test, train"),
        ("accuracy", r"test, train"),
        ("test/acuracy", r"Did you mean 'test/accuracy'\?.*test/both/mean.*test/loss"),
        ("test/both", r"There are: .*test/both/mean, test/both/top"),
        ("test/", r"test/accuracy"),
        ("test", r"test/accuracy"),
        ("train/accuracy", r"There are: train/loss"),
    ],
)
def test_a_name_that_no_meter_has_is_an_error_at_the_start(
    metric: str, says: str, mode: str | None
) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        ranking(metric, mode)
    assert error.value.key == "hooks.mine.metric"


def test_a_value_that_its_meter_does_not_name_needs_a_mode() -> None:
    """It may report others than it names."""
    with pytest.raises(ConfigError, match=r"Did you mean 'test/both/top'\?") as error:
        ranking("test/both/topp")
    assert error.value.key == "hooks.mine.metric"
    assert ranking("test/both/other", "max").mode == "max"


@pytest.mark.parametrize(
    ("options", "key"), [({"mode": "up"}, "mode"), ({"min_delta": -1}, "min_delta")]
)
def test_wrong_options_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Ranking("hooks.mine", "test/accuracy", **options)
    assert error.value.key == f"hooks.mine.{key}"


def at_the_end_of(name: str, **metrics: float) -> Task:
    made = task()
    made.phase = Phase(name, name == "train", 1, 1, done=True)
    made.phase.metrics = {f"{name}/{key}": value for key, value in metrics.items()}
    return made


def test_the_score_is_read_at_the_end_of_its_own_phase() -> None:
    rank = ranking("test/accuracy")
    assert rank.score(at_the_end_of("test", accuracy=0.5)) == 0.5
    assert rank.score(at_the_end_of("test", accuracy=0.0)) == 0.0
    assert rank.score(at_the_end_of("train", accuracy=0.5)) is None


def test_a_metric_that_was_not_reported_is_an_error_with_those_that_were() -> None:
    with pytest.raises(
        MetricError, match=r"test/both/topp.*Did you mean.*test/both/top, test/loss"
    ):
        ranking("test/both/topp", "max").score(
            at_the_end_of("test", **{"both/top": 1.0, "loss": 2.0})
        )
