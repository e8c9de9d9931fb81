"""RES with streams: an interrupted run goes on in a new process with the very next sample."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Data
from tests.contract.test_res import (
    BREAKS,
    ENDS,
    KILLED,
    check_res_a,
    finish,
    go,
    ids_of_epoch,
    updates,
)  # fmt: skip
from tests.rigs import process, r1, streams
from tests.rigs.equal import assert_eq, newest, probe_of, undisturbed
from tests.rigs.r1 import At

READ = [(kind, workers) for kind in streams.KINDS for workers in (0, 2)]


def options_of(kind: str, workers: int, **more: Any) -> dict[str, Any]:
    return {"train": streams.data(kind, workers), **more}


@pytest.mark.parametrize("way", BREAKS)
@pytest.mark.parametrize(("kind", "workers"), READ)
def test_res_a_every_sample_of_the_interrupted_pass_once(
    tmp_path: Path, kind: str, workers: int, way: str
) -> None:
    """Stopped in epoch 2 after update 7 of 10; augmentation draws from all three generators."""
    check_res_a(tmp_path / "run", way, options_of(kind, workers))


@pytest.mark.parametrize("kind", ["plain", "buffered"])
def test_res_b_the_order_belongs_to_the_pass(tmp_path: Path, kind: str) -> None:
    """Drawn when a pass begins, from a generator that the engine has seeded."""
    stream = streams.KINDS[kind](augment=True, draws_order=True)
    options: dict[str, Any] = {"epochs": 4, "train": Data(stream, r1.BATCH)}
    folder = tmp_path / "run"
    go(folder, At("on_step", 14, signal.SIGTERM), **options)
    finish(folder, **options)
    orders = [ids_of_epoch(folder, epoch) for epoch in (1, 2, 3, 4)]
    assert orders == [ids_of_epoch(undisturbed(**options), epoch) for epoch in (1, 2, 3, 4)]
    assert all(sorted(order) == list(range(r1.SAMPLES)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert_eq(undisturbed(**options), folder)


@pytest.mark.parametrize("workers", [0, 2])
def test_res_c_and_e_with_a_test_stream_in_mid_epoch(tmp_path: Path, workers: int) -> None:
    """Killed inside a test in mid-epoch: it is run again as a whole, and no epoch is shortened."""
    options = options_of("stateful", workers, epochs=4, phases={"test_every_updates": 4},
                         test={"test": Data(streams.Stream(6, augment=True), 4, workers=workers)},
                         save={"every_updates": 2})  # fmt: skip
    folder = tmp_path / "run"
    assert go(folder, At("on_step", 12, phase="test", position=1), **options).code == KILLED
    finish(folder, **options)
    first, second = r1.lives(probe_of(folder))
    assert updates(first) == list(range(1, 13))
    assert updates(second) == list(range(13, 41))
    tests = [x for x in r1.lines(probe_of(folder), "phase_end") if x["phase"] == "test"]
    # At every fourth update, of which the 20th and the 40th end an epoch, and at each epoch's end.
    assert [x["update"] for x in tests] == [4, 8, 10, 12, 16, 20, 24, 28, 30, 32, 36, 40]
    assert all(x["ids"] == list(range(6)) for x in tests)
    assert_eq(undisturbed(**options), folder)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("kind", "workers"), [("stateful", 0), ("buffered", 2)])
def test_res_d_an_epochs_very_end(tmp_path: Path, end: str, kind: str, workers: int) -> None:
    options = options_of(kind, workers, save={"every_updates": 10, "every_epochs": None})
    folder = tmp_path / "run"
    assert go(folder, ENDS[end], **options).code == KILLED
    assert newest(folder).manifest["updates"] == 10
    finish(folder, **options)
    first, second = r1.lives(probe_of(folder))
    assert updates(first) == list(range(1, 11))
    assert updates(second) == list(range(11, 31))
    assert_eq(undisturbed(**options), folder)


@pytest.mark.parametrize("kind", streams.KINDS)
def test_res_f_a_run_that_ended_inside_a_pass_goes_on_in_it(tmp_path: Path, kind: str) -> None:
    """As with other data, the epoch has two phases then; its samples are those of one."""
    folder = tmp_path / "run"
    length: dict[str, Any] = {"epochs": None, "train": streams.data(kind)}
    finish(folder, phases={"updates": 15}, **length)
    finish(folder, phases={"updates": 25}, **length)
    finish(folder, phases={"updates": 30}, **length)
    assert [updates(life) for life in r1.lives(probe_of(folder))] == [
        list(range(1, 16)), list(range(16, 26)), list(range(26, 31)),
    ]  # fmt: skip
    whole = undisturbed(phases={"updates": 30}, **length)
    assert [ids_of_epoch(folder, epoch) for epoch in (1, 2, 3)] == [
        ids_of_epoch(whole, epoch) for epoch in (1, 2, 3)
    ]


@pytest.mark.parametrize(("epoch", "at"), [(1, 2), (2, 2), (2, 14)])
@pytest.mark.parametrize("workers", [0, 2])
def test_sig_a_while_it_waits_for_a_slow_stream(
    tmp_path: Path, workers: int, epoch: int, at: int
) -> None:
    """The stream stops for a minute: before update 1, between two epochs, and inside one."""
    made = {}
    for name in ("slow", "quick"):
        mark = tmp_path / name
        if name == "quick":
            mark.touch()
        stream = streams.Slow(at, mark, epoch, augment=True)
        made[name] = {"train": Data(stream, r1.BATCH, workers=workers)}
    folder, whole = tmp_path / "run", tmp_path / "whole"
    finish(whole, **made["quick"])
    running = process.start(r1.train, folder, probe_of(folder), hooks={}, **made["slow"])
    until = time.monotonic() + process.LIMIT
    while not (tmp_path / "slow").exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
    sent = time.monotonic()
    running.send(signal.SIGTERM)
    ended = running.wait()
    assert ended.value["signal"] == signal.SIGTERM
    assert time.monotonic() - sent < 10  # as SIG-a has it
    finish(folder, **made["slow"])
    assert_eq(whole, folder)


def test_another_number_of_workers_or_processes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go(folder, At("on_step", 14, "stop"), **options_of("stateful", 2))
    for workers in (0, 3):
        ended = go(folder, **options_of("stateful", workers))
        assert ended.code == 1
        assert f"data.train.workers: {workers} now and 2 in the checkpoint" in ended.output
    finish(folder, **options_of("stateful", 2))
    assert_eq(undisturbed(**options_of("stateful", 2)), folder)


def test_a_stream_without_a_state_says_what_it_reads_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go(folder, At("on_step", 14, "stop"), **options_of("plain", 0))
    said = go(folder, **options_of("plain", 0)).output
    # Four batches of four in the interrupted epoch.
    assert said.count("16 samples are read again") == 1
