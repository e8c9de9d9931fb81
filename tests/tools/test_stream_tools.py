"""The tools with a stream as training data: replay, plan, and what a command line refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phaseloop import Data, Schedule
from phaseloop.engine.schedules import cosine
from phaseloop.hooks.learning_rate import LearningRate
from phaseloop.hooks.progress import _samples
from phaseloop.tools.planning.curves import follow
from phaseloop.tools.planning.facts import facts
from phaseloop.tools.replay import replay, report
from phaseloop.tools.run import DONE, WRONG_CONFIG
from phaseloop.tools.run import run as train_here
from tests.contract.test_data_stream import STREAM
from tests.rigs import cli, r1, streams
from tests.rigs.r0 import train


def test_replay_comes_to_the_update_as_the_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint of update 21, one window into the third pass."""
    cli.folder(tmp_path, stream=STREAM)
    monkeypatch.chdir(tmp_path)
    save = "hooks.checkpoint={every_updates: 7, keep_last: 2}"
    augment = "data.train.dataset.augment=true"
    words = ["config=stream", "run.log_every=1", "run.dir=here", save, augment]
    assert train_here(words) == DONE
    found = replay(tmp_path / "here", 24)
    assert found.start.endswith("update_000000021-1")
    assert found.same_when_watched
    assert not found.differs
    assert found.batch == (4, None)
    assert "(epoch 3, batch 4)" in report(found)


@pytest.mark.parametrize(("override", "key"), [
    ("data.train.shuffle=true", "data.train.shuffle"), ("data.test.limit=0.5", "data.test.limit"),
    ("phases={epochs: 2.5}", "phases.epochs"),
    ("hooks.non_finite.policy=roll_back", "hooks.non_finite.policy"),
])  # fmt: skip
def test_what_a_stream_cannot_have_is_wrong_configuration(
    override: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    cli.folder(tmp_path, stream=STREAM)
    monkeypatch.chdir(tmp_path)
    assert train_here(["config=stream", override]) == WRONG_CONFIG
    assert f"{key}: " in capsys.readouterr().err


def test_the_plan_of_a_stream(tmp_path: Path) -> None:
    phases = {"updates": 25}
    task = r1.make_task(
        tmp_path, epochs=None, phases=phases, train=Data(streams.Stream(), 4),
        schedule=Schedule(cosine()),
    )  # fmt: skip
    task.build()
    told = list(facts(task))
    assert ("training", "25 updates in passes of unknown length") in told
    assert ("batch", "4 samples, in 1 micro-batch; the last of an epoch as it comes") in told
    assert ("data", "train: a stream") in told
    rates = follow(task).lines["optimizer", "lr", 0]
    assert rates[0] == list(range(1, 26))
    expected = [0.1 * (1 + math.cos(math.pi * k / 25)) / 2 for k in range(25)]
    assert rates[1] == pytest.approx(expected)
    assert _samples(task, 0) == 25 * 4


def test_the_plan_of_epochs_of_a_stream() -> None:
    task = r1.make_task(None, epochs=3, train=Data(streams.Stream(), 4))
    task.build()
    assert ("training", "3 epochs of unknown length") in list(facts(task))
    assert train(
        r1.make_task(None, epochs=3, train=Data(streams.Stream(), 4)), rate=LearningRate()
    ).updates == 30  # fmt: skip
