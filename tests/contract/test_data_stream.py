"""DATA and MEM with streams: lengths that show at the end, one-pass and empty streams."""

from __future__ import annotations

import gc
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phaseloop import (
    ConfigError,
    Data,
    DataError,
    Phases,
    Run,
    Schedule,
    Task,
    Trainer,
    Warmup,
)
from phaseloop.engine.schedules import constant, cosine
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.meter_sync import MeterSync
from tests.contract.test_mem import Census
from tests.rigs import cli, r1, streams
from tests.rigs.equal import newest, state_of
from tests.rigs.probes import watch
from tests.rigs.r0 import r0, train, weight

TEN = {"updates": 25}  # DATA-c: of 10 batches a pass, that is 3 passes
STREAM = """\
# @package _global_
defaults:
  - tiny
  - _self_
imports: [tests.rigs.tiny, tests.rigs.streams]
phases: {epochs: null, updates: 25}
data:
  train: {dataset: {name: r1_stream}, batch_size: 4}
  test: {dataset: {name: r1_stream, count: 10}, batch_size: 4}
"""


def places(task: Task) -> tuple[int, int]:
    """Epoch and window of an update, at its end."""
    return task.progress.epoch, task.progress.windows


# --- DATA-b ---


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("which", ["data.train", "data.test"])
def test_data_b_an_empty_stream_is_an_error_by_name(which: str, workers: int) -> None:
    empty = Data(streams.Stream(0), 4, workers=workers)
    parts = {"data.train": {"train": empty}, "data.test": {"test": {"test": empty}}}
    task = r1.make_task(None, epochs=1, **parts[which])
    with pytest.raises(DataError, match=rf"^{which}: the stream is empty"):
        train(task)


def test_data_b_a_stream_that_fills_no_batch_names_the_size() -> None:
    task = r1.make_task(None, train=Data(streams.Stream(3), 4, drop_last=True))
    with pytest.raises(DataError, match=r"^data\.train: .* one batch of 4, and .*drop_last"):
        train(task)


def test_data_b_a_length_of_0_is_known_before_anything_is_read() -> None:
    with pytest.raises(DataError, match=r"^data\.train: the stream is empty: its length is 0"):
        r1.make_task(None, train=Data(streams.WithLength(0), 4))


def test_data_b_on_the_command_line(tmp_path: Path) -> None:
    folder = cli.folder(tmp_path, stream=STREAM)
    ended = cli.forked(["config=stream", "data.train.dataset.count=0"], folder)
    assert ended.returncode == 1
    assert "data.train: the stream is empty" in ended.stdout + ended.stderr


# --- DATA-c ---


@pytest.mark.parametrize("workers", [0, 2])
def test_data_c_25_updates_over_3_passes(workers: int) -> None:
    probe = watch("on_step", places)
    ends = watch("on_phase_end", places)
    task = r1.make_task(None, epochs=None, phases=TEN, train=streams.data("stateful", workers))
    outcome = train(task, probe=probe, ends=ends)
    assert (outcome.status, outcome.updates) == ("finished", 25)
    assert probe.seen == [(e, w) for e in (1, 2, 3) for w in range(1, 11)][:25]
    assert ends.seen == [(1, 10), (2, 10), (3, 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_c_a_one_pass_stream_stops_at_10_and_says_so(tmp_path: Path, workers: int) -> None:
    made: dict[str, Any] = {"epochs": None, "phases": TEN}
    for again in (False, True):  # the same command once more makes no update
        made["train"] = Data(streams.OnePass(), 4, workers=workers)
        outcome = Trainer(r1.make_task(tmp_path, **made), r1.make_hooks()).train()
        assert outcome.updates == 10
        assert outcome.status == "stopped"
        assert "data.train is used up after 10 updates" in outcome.reason
        assert json.loads((tmp_path / "status.json").read_text())["reason"] == outcome.reason
        assert state_of(newest(tmp_path))["progress"]["epoch"] == 1, again


def test_data_c_a_schedule_without_a_total_is_an_error_at_the_start() -> None:
    def fails(schedule: Schedule, key: str, **phases: Any) -> None:
        stream = streams.Stateful()
        task = r1.make_task(None, train=Data(stream, 4), schedule=schedule, **phases)
        with pytest.raises(ConfigError, match=key):
            train(task)
        assert stream.position == 0  # nothing was read

    warm = Warmup(epochs=1)
    fails(Schedule(cosine()), r"^schedule: .*phases\.updates", epochs=3)
    fails(Schedule(cosine()), r"^schedule: .*phases\.updates", epochs=3, phases={"updates": 9})
    fails(Schedule(constant(), warmup=warm), r"^schedule: .*phases\.updates", epochs=3)
    fails(Schedule(cosine(), warmup=warm), r"it counts in epochs", epochs=None, phases=TEN)
    fails(Schedule(cosine(), interval="epoch"), r"^schedule\.interval", epochs=None, phases=TEN)


@pytest.mark.parametrize(
    ("schedule", "stream", "phases"),
    [
        (Schedule(constant()), streams.Stream(), {"epochs": 3}),
        (Schedule(cosine()), streams.WithLength(), {"epochs": 3}),
        (Schedule(cosine(), interval="epoch"), streams.WithLength(), {"epochs": 3}),
        (Schedule(cosine()), streams.Stream(), {"epochs": None, "phases": {"updates": 30}}),
    ],
)
def test_data_c_schedules_with_a_total(
    schedule: Schedule, stream: streams.Stream, phases: dict[str, Any]
) -> None:
    task = r1.make_task(None, train=Data(stream, 4), schedule=schedule, **phases)
    assert train(task, **r1.make_hooks()).updates == 30


def test_data_c_on_the_command_line(tmp_path: Path) -> None:
    folder = cli.folder(tmp_path, stream=STREAM)
    ended = cli.run(["config=stream", "run.dir=runs/a"], folder)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((folder / "runs/a/status.json").read_text())["updates"] == 25
    refused = cli.forked(["config=stream", "phases={epochs: 3}", "schedule=cosine"], folder)
    assert refused.returncode == 2
    assert "phases.updates" in refused.stderr
    words = ["config=stream", "data.train.dataset.name=r1_one_pass", "run.dir=runs/once"]
    once = cli.forked(words, folder)
    assert once.returncode == 0
    assert "data.train is used up after 10 updates" in once.stdout + once.stderr
    again = cli.forked(words, folder)
    assert again.returncode == 0
    assert "there is nothing to go on with: data.train is used up" in again.stdout
    assert "setting changed" not in again.stdout


# --- DATA-d ---


def trace(kind: str, workers: int, every: int | None = None, test_workers: int = 0) -> Any:
    """Ids and loss of every update, the draws after it, and the final parameters.

    Test steps draw too. One worker reads what this process would: with it, nothing is seeded here.
    """
    options: dict[str, Any] = {}
    if every is not None:
        test = Data(streams.Stream(6, augment=True), 4, workers=test_workers)
        options = {"test": {"test": test}, "phases": {"test_every_updates": every}}
    model = r1.network()
    train_data = streams.data(kind, workers)
    task = r1.make_task(None, model=model, epochs=2, train=train_data, **options)

    def look(task: Task) -> Any:
        drawn = r1.draws()
        if not task.train or task.batch is None or task.loss is None:
            return None
        return task.batch.data["index"].tolist(), float(task.loss), drawn

    probe = watch("on_step", look)
    train(task, probe=probe, sync=MeterSync())
    seen = [x for x in probe.seen if x is not None]
    return seen, {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", streams.KINDS)
def test_data_d_testing_changes_nothing_of_the_training(kind: str) -> None:
    never = trace(kind, 1)
    assert len(never[0]) == 20
    assert trace(kind, 0) == never
    assert trace(kind, 1, 3, 0) == never
    assert trace(kind, 0, 3, 0) == never
    assert trace(kind, 0, 3, 2) == never


# --- GA-a and GA-c: batches and weights ---


class Numbers(streams.IterableDataset[Any]):
    """Floats in order, and no length."""

    def __init__(self, xs: range) -> None:
        self.xs = xs

    def __iter__(self) -> Any:
        return (torch.tensor([float(x)]) for x in self.xs)


@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 1}, {"accumulate": 3}])
def test_ga_a_batches_never_cross_a_pass_s_end(cut: dict[str, int]) -> None:
    """GA-a: x = 1..10 in fours from w = 0: -2.5 - 6.5 - 9.5 = -18.5, in 3 updates."""
    task = r0([0], 4, train=Data(Numbers(range(1, 11)), 4, **cut))
    assert train(task).updates == 3
    assert weight(task) == pytest.approx(-18.5, abs=1e-5)
    two = r0([0], 4, train=Data(Numbers(range(1, 11)), 4, **cut), epochs=2)
    assert train(two).updates == 6
    assert weight(two) == pytest.approx(-37.0, abs=1e-5)


def test_ga_a_drop_last_and_limit() -> None:
    task = r0([0], 4, train=Data(Numbers(range(1, 11)), 4, drop_last=True))
    assert train(task).updates == 2
    assert weight(task) == -9.0  # -2.5 - 6.5
    task = r0([0], 4, train=Data(Numbers(range(1, 11)), 4, limit=6))
    assert train(task).updates == 2
    assert weight(task) == -8.0  # -2.5, and -5.5 of 5 and 6


# --- MEM-a ---


@pytest.mark.parametrize("passes", [10, 1])
def test_mem_a_memory_is_flat_over_and_within_the_passes_of_a_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passes: int
) -> None:
    """In one long pass nothing is given up at its end: what is kept of each batch shows."""
    monkeypatch.setattr(logging.getLogger("phaseloop"), "propagate", False)
    kind = streams.Stateful if passes == 1 else streams.Buffered
    gc.collect()
    gc.freeze()
    try:
        model = r1.network()
        task = Task(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=r1.optimizer("sgd", model),
            train=Data(kind(2000 // passes), 2),
            test=Data(streams.Stream(200), 50),
            phases=Phases(epochs=passes, test_every_updates=100),
            run=Run(str(tmp_path), log_every=50),
        )
        census = Census(300, 500, 1000)
        train(task, checkpoint=Checkpoint(), census=census)
    finally:
        gc.unfreeze()
    assert (task.progress.updates, task.progress.epoch) == (1000, passes)
    _, early, late = census.counts
    assert (late - early) - Counter(["Counter"]) == Counter()
