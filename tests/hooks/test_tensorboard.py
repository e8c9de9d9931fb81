"""Hook ``tensorboard``: what TensorBoard shows, read back, also after interruptions."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

from phaseloop import Trainer
from phaseloop.engine import event_files
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.meter_sync import MeterSync
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import process, r1
from tests.rigs.equal import rows
from tests.rigs.probes import Scripted

EVERY_10 = {"every_epochs": None, "every_updates": 10}
"""Checkpoints at updates 10 and 20: after the log point, before the epoch's end and its test."""


SPEED = "speed/samples_per_second"


def train(folder, save=None, at=None, **options):
    """Train R1 for 2 epochs of 10 updates, each with a test, in a new process."""
    hooks = {"tensorboard": TensorBoard()}
    if at is not None:
        hooks["at"] = at
    settings = {"epochs": 2, "test": True, "run": {"log_every": 1}, **options}
    return process.run(r1.train, folder, save=save, hooks=hooks, **settings)


def scalars(folder):
    """Tag to (update, value), as TensorBoard reads the folder; without what saves cost.

    Speeds have to be some; their values are left out.
    """
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    points = {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
        if not tag.startswith("save/")
    }
    assert all(value > 0 for _, value in points[SPEED])
    return {**points, SPEED: [(step, None) for step, _ in points[SPEED]]}


def starts(path):
    """Updates from which on a file tells its readers to forget what came before."""
    return [
        event.step
        for event in LegacyEventFileLoader(str(path)).Load()
        if event.HasField("session_log") and event.session_log.status == SessionLog.START
    ]


def files(folder):
    return sorted((folder / "tensorboard").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The scalars of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(folder).code == 0
    return scalars(folder)


def test_stable_names_over_updates(undisturbed):
    each, ends = list(range(1, 21)), [10, 20]
    assert {tag: [step for step, _ in points] for tag, points in undisturbed.items()} == {
        "train/loss": each,
        "lr": each,
        "epoch/train/loss": ends,
        "epoch/train/accuracy": ends,
        "test/loss": ends,
        "test/accuracy": ends,
        "best/test/loss": ends,
        "best/test/accuracy": ends,
        SPEED: each,
    }


def test_values_are_those_of_the_rows(tmp_path):
    folder = tmp_path / "run"
    train(folder)
    points = dict(scalars(folder)["train/loss"])
    logged = {row["update"]: row["loss"] for row in rows(folder) if "loss" in row}
    assert points == pytest.approx(logged, rel=1e-6)  # event files hold float32


@pytest.mark.parametrize("save", [EVERY_10, None], ids=["by updates", "by epochs"])
@pytest.mark.parametrize(
    "at",
    [
        r1.At("on_step", 14),
        r1.At("on_forward", 10, phase="test"),
        r1.At("on_phase_end", 10, phase="test"),
        r1.At("on_forward", 20, phase="test"),
        r1.At("on_step", 20),
    ],
    ids=["update 14", "first test", "after the first test", "last test", "last update"],
)
def test_killed_and_resumed_each_update_is_there_once(undisturbed, tmp_path, save, at):
    folder = tmp_path / "run"
    assert train(folder, save, at).code == -signal.SIGKILL
    assert train(folder, save).code == 0
    assert scalars(folder) == undisturbed


def test_saved_at_10_and_killed_at_14_it_is_purged_from_11(tmp_path):
    folder = tmp_path / "run"
    train(folder, EVERY_10, r1.At("on_step", 14))
    (old,) = files(folder)
    before = old.read_bytes()
    train(folder, EVERY_10)
    assert old.read_bytes() == before  # old files are left alone
    (new,) = set(files(folder)) - {old}
    # The checkpoint was made before the end of epoch 1 was logged: update 10 is written once more.
    assert starts(new) == [11, 10]


def test_saved_in_mid_epoch_only_what_follows_is_purged(undisturbed, tmp_path):
    folder = tmp_path / "run"
    save = {"every_epochs": None, "every_updates": 5}
    train(folder, save, r1.At("on_step", 9))
    train(folder, save)
    assert scalars(folder) == undisturbed


def test_killed_before_any_checkpoint(undisturbed, tmp_path):
    folder = tmp_path / "run"
    train(folder, EVERY_10, r1.At("on_step", 7))
    train(folder, EVERY_10)
    assert scalars(folder) == undisturbed


def test_stopped_then_killed(undisturbed, tmp_path):
    """The checkpoint at a stop is made after this hook has closed its file."""
    folder = tmp_path / "run"
    train(folder, {"every_epochs": None}, r1.At("on_step", 12, signal.SIGTERM))
    train(folder, {"every_epochs": None}, r1.At("on_step", 15))
    train(folder, {"every_epochs": None})
    assert scalars(folder) == undisturbed


def test_killed_three_times_with_a_torn_file(undisturbed, tmp_path):
    folder = tmp_path / "run"
    for update in (3, 12, 17):
        train(folder, {"every_updates": 2}, r1.At("on_step", update))
        newest = files(folder)[-1]
        newest.write_bytes(newest.read_bytes()[:-5] if update == 12 else newest.read_bytes())
    train(folder, {"every_updates": 2})
    found = scalars(folder)
    for tag in ("train/loss", "lr"):
        assert [step for step, _ in found[tag]] == list(range(1, 21))
    assert found == undisturbed


def test_a_longer_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    train(folder, epochs=1)
    train(folder, epochs=2)
    found = scalars(folder)
    assert [step for step, _ in found["train/loss"]] == list(range(1, 21))
    assert [step for step, _ in found["test/accuracy"]] == [10, 20]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Trainer(r1.make_task(None, epochs=1), {"tensorboard": TensorBoard()}).train()
    assert list(tmp_path.iterdir()) == []


def test_only_the_primary_writes(tmp_path, monkeypatch):
    task = r1.make_task(tmp_path, epochs=1)
    monkeypatch.setattr(type(task), "primary", property(lambda self: False))
    Trainer(task, {"tensorboard": TensorBoard()}).train()
    assert not (tmp_path / "tensorboard").exists()


def test_nan_and_no_test_data(tmp_path):
    hooks = {"tensorboard": TensorBoard(), "meter_sync": MeterSync()}
    meters = {"score": Scripted([math.nan])}
    Trainer(r1.make_task(tmp_path, epochs=1, train_meters=meters), hooks).train()
    found = scalars(tmp_path)
    ((step, value),) = found["epoch/train/score"]
    assert step == 10 and math.isnan(value)
    assert not any(tag.startswith("test") for tag in found)


def test_recorded_scalars_and_parts_of_the_loss(tmp_path):
    class Record(r1.At):
        def on_update(self, task):
            task.record("grad_norm", 2.0)

    def parts(output, target):
        loss = r1.nn.functional.cross_entropy(output, target)
        return {"ce": loss, "l2": 0 * loss}

    hooks = {"tensorboard": TensorBoard(), "record": Record("on_step", -1)}
    Trainer(r1.make_task(tmp_path, epochs=1, criterion=parts), hooks).train()
    found = scalars(tmp_path)
    assert found.keys() == {"train/loss", "train/loss/ce", "train/loss/l2", "grad_norm", SPEED}
    assert {value for _, value in found["grad_norm"]} == {2.0}


def test_what_a_checkpoint_counts_as_written_is_flushed_before():
    """The writer has a thread of its own, which may be behind."""
    flushed = []
    hook = TensorBoard()
    hook._writer = SimpleNamespace(flush=lambda: flushed.append(1))
    hook.state_dict()
    assert flushed == [1]


def test_a_file_name_that_readers_would_take_too_early_is_waited_for(tmp_path, monkeypatch):
    now, slept = [1000.25], []

    class Clock:
        @staticmethod
        def time():
            return now[0]

        @staticmethod
        def sleep(seconds):
            slept.append(seconds)

    monkeypatch.setattr(event_files, "time", Clock)
    host, me = socket.gethostname(), os.getpid()
    (tmp_path / f"events.out.tfevents.0000001000.{host}.{me}.0").touch()
    event_files.wait_for_a_later_name(tmp_path)
    assert slept == []  # files of one process are counted up
    (tmp_path / f"events.out.tfevents.0000001000.{host}.{me}9.0").touch()
    event_files.wait_for_a_later_name(tmp_path)
    assert slept == [0.75]
    now[0] = 1001.0
    event_files.wait_for_a_later_name(tmp_path)
    assert slept == [0.75]


def test_importing_the_hooks_imports_neither_tensorboard_nor_matplotlib_nor_fvcore_nn():
    # A process of its own: the one that others are forked from has imported them all.
    late = ["tensorboard", "matplotlib", "fvcore.nn"]
    code = f"import sys, phaseloop.hooks; print([name in sys.modules for name in {late}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False, False]"


def test_old_files_stay(tmp_path):
    folder = Path(tmp_path)
    hooks = {"tensorboard": TensorBoard(), "checkpoint": Checkpoint()}
    Trainer(r1.make_task(folder, epochs=1), hooks).train()
    first = files(folder)
    hooks = {"tensorboard": TensorBoard(), "checkpoint": Checkpoint()}
    Trainer(r1.make_task(folder, epochs=2), hooks).train()
    assert set(first) < set(files(folder))


def test_files_of_a_clock_that_was_set_back_since_stand_before_ours(tmp_path: Path) -> None:
    """In their order, and after what is older than they; twice, as if it were set back again."""
    now = int(time.time())
    for second in (now - 100, now + 50, now + 3600):
        (tmp_path / f"events.out.tfevents.{second:010d}.host.7.0").touch()
    inodes = [p.stat().st_ino for p in sorted(tmp_path.iterdir())]
    for _ in range(2):
        event_files.make_older(tmp_path)
        (tmp_path / f"events.out.tfevents.{now + 500:010d}.host.7.0").touch()
        there = sorted(tmp_path.iterdir())
        assert [p.stat().st_ino for p in there[:3]] == inodes
        assert all(p.name < f"events.out.tfevents.{now + 10:010d}" for p in there[:3])
