"""CK: checkpoints. Whole or not there; kept as asked for; only tensors and plain Python."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from phaseloop import Compile, ConfigError, Hook, ModelOptions, Order, Task, Trainer
from phaseloop.engine.checkpoint import local, store
from phaseloop.engine.checkpoint.contents import MODEL, STATE
from phaseloop.engine.errors import CheckpointError
from phaseloop.engine.run_folder import RunFolder
from phaseloop.hooks.average import Average
from phaseloop.hooks.checkpoint import Checkpoint
from phaseloop.hooks.tensorboard import TensorBoard
from tests.rigs import equal, process, r1
from tests.rigs.equal import assert_eq, newest, probe_of, reference, undisturbed
from tests.rigs.probes import Scripted, SlowWrites
from tests.rigs.r1 import At

KILLED = -signal.SIGKILL


def go(folder: Path, at: At | None = None, **options: Any) -> process.Ended:
    """One process of the run in ``folder``, broken off by ``at``, or to its end."""
    hooks = {**options.pop("hooks", {}), **({} if at is None else {"at": at})}
    return process.run(r1.train, folder, probe_of(folder), hooks=hooks, **options)


# --- CK-a: in a new process, killed while a checkpoint is made or removed ---


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_opening() -> None:
    def create(self: local.Local, name: str, file: str) -> Any:
        die()

    local.Local.create = create  # type: ignore[method-assign]


def die_at_half_the_bytes() -> None:
    write = store._HashingFile.write

    def half(self: Any, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < 100:  # a header; the first tensor is longer
            return write(self, data)
        write(self, bytes(data)[: size // 2])
        self.flush()
        die()
        return size

    store._HashingFile.write = half  # type: ignore[method-assign]


def die_before_renaming() -> None:
    def rename(old: Any, new: Any) -> None:
        die()

    os.rename = rename


def die_after_renaming() -> None:
    rename = os.rename

    def rename_and_die(old: Any, new: Any) -> None:
        rename(old, new)
        die()

    os.rename = rename_and_die


def die_before_pruning() -> None:
    def remove(self: store.Store, name: str) -> None:
        die()

    store.Store.remove = remove  # type: ignore[method-assign]


def die_while_pruning() -> None:
    def remove(path: Path) -> None:
        for part in sorted(path.iterdir()) if path.exists() else []:
            part.unlink()
            die()

    local.remove = remove


class ArmAt(Hook):
    """Before the checkpoint hook is called at update ``updates``, arms what will kill."""

    order = Order.LOG

    def __init__(self, updates: int, arm: Callable[[], None]) -> None:
        self.updates = updates
        self.arm = arm

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.updates:
            task.writer.settle()  # it is the next one that is to be cut short
            self.arm()


@pytest.mark.parametrize(
    ("arm", "left"),
    [
        (die_before_opening, 12),
        (die_at_half_the_bytes, 12),
        (die_before_renaming, 12),
        (die_after_renaming, 15),
        (die_before_pruning, 15),
        (die_while_pruning, 15),
    ],
)
def test_ck_a_killed_while_saving(tmp_path: Path, arm: Callable[[], None], left: int) -> None:
    save = {"every_updates": 3, "every_epochs": None}
    folder = tmp_path / "run"
    assert go(folder, hooks={"arm": ArmAt(15, arm)}, save=save).code == KILLED
    assert newest(folder).manifest["updates"] == left

    ended = go(folder, save=save)
    assert ended.code == 0, ended.output
    assert "set_aside" not in os.listdir(folder / "checkpoints")  # a leftover is no checkpoint
    assert r1.lives(probe_of(folder))[1][0]["update"] == left + 1
    assert_eq(undisturbed(save=save), folder)
    # Nothing stays behind: the one checkpoint that was asked for, and that is all.
    assert len(set(os.listdir(folder / "checkpoints")) - {".lock"}) == 1


def test_ck_a_killed_between_writing_and_removing_again_and_again(tmp_path: Path) -> None:
    """What a killed process had still to remove is removed by a later one."""
    save = {"every_updates": 3, "every_epochs": None, "keep_last": 2}
    folder = tmp_path / "run"
    for updates in (9, 12, 15, 18):
        ended = go(folder, hooks={"arm": ArmAt(updates, die_before_pruning)}, save=save)
        assert ended.code == KILLED
        assert len(store.Store(folder / "checkpoints").names()) == 3
    assert go(folder, save=save).code == 0
    assert len(store.Store(folder / "checkpoints").names()) == 2
    assert_eq(undisturbed(save=save), folder)


def test_ck_a_stopped_in_tests_again_and_again(tmp_path: Path) -> None:
    """A checkpoint made inside a test holds the state from before it, yet counts as this run's."""
    options = {"test": True, "phases": {"test_every_updates": 2}, "save": {"every_epochs": None}}
    folder = tmp_path / "run"
    for updates in (2, 4, 6, 8):
        at = At("on_step", updates, signal.SIGTERM, phase="test", position=1)
        assert go(folder, at, **options).value["status"] == "stopped"
    assert len(store.Store(folder / "checkpoints").names()) == 1
    assert go(folder, **options).code == 0
    assert len(store.Store(folder / "checkpoints").names()) == 1
    assert_eq(undisturbed(**options), folder)


# --- in the background ---


def all_of(folder: Path) -> dict[str, store.Saved]:
    checkpoints = store.Store(folder / "checkpoints")
    return {name: store.verified(checkpoints.folder / name) for name in checkpoints.names()}


def test_ck_a_what_is_written_is_the_state_as_it_was(tmp_path: Path) -> None:
    """Training goes on while it is written: every checkpoint is the one made without a hurry."""
    options: dict[str, Any] = {"test": True, "optimizer_name": "adam", "augment": True}
    save = {"every_updates": 2, "keep_last": 99, "keep_best": 2, "metric": "test/accuracy"}
    slow = SlowWrites()
    hooks: dict[str, Hook] = {"slow": slow, "average": Average(decay=0.5), "count": r1.Counter()}
    r1.train(tmp_path / "slow", save=save, hooks=hooks, **options)
    made = [store.position(name)[0] for name in slow.written]
    assert any(now > then for then, now in zip(made, slow.updates, strict=True))
    hooks = {"average": Average(decay=0.5), "count": r1.Counter()}
    r1.train(tmp_path / "calm", save={**save, "background": False}, hooks=hooks, **options)
    there, wanted = all_of(tmp_path / "slow"), all_of(tmp_path / "calm")
    assert list(there) == list(wanted) and {*there} <= {*slow.written}
    for name in wanted:
        files = [side[name].path / MODEL for side in (there, wanted)]
        assert files[0].read_bytes() == files[1].read_bytes()
        states = [equal.state_of(side[name]) for side in (there, wanted)]
        assert list(equal.differ("state", *states)) == []


def test_ck_a_one_save_is_in_flight_and_the_next_one_waits(tmp_path: Path) -> None:
    folder, slow = tmp_path / "run", SlowWrites(0.03)
    save = {"every_updates": 1, "every_epochs": None, "keep_last": 99}
    r1.train(folder, save=save, hooks={"slow": slow}, epochs=1)
    assert slow.at_once == 1
    made = [store.position(name) for name in slow.written]
    assert made == [*((n, 1) for n in range(1, 11)), (10, 2)]
    costs = [line for line in lines_of(folder) if line.get("event") == "save"]
    assert [line["checkpoint"] for line in costs] == slow.written
    there = all_of(folder)
    for cost in costs:
        assert cost["seconds"] >= slow.seconds
        if cost["checkpoint"] in there:  # the first of the two at update 10 is not kept
            manifest = there[cost["checkpoint"]].manifest
            assert cost["update"] == manifest["updates"]
            assert cost["bytes"] == sum(file["bytes"] for file in manifest["files"].values())
    # Steps take a tenth of it, so each save but the first waits for most of the one before.
    assert sum(cost["stall"] for cost in costs) > 5 * slow.seconds


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_ck_a_what_a_save_costs_is_in_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hooks: dict[str, Hook] = {"tensorboard": TensorBoard()}
    r1.train(folder, save={"every_updates": 3, "keep_last": 99}, hooks=hooks)
    for saved in all_of(folder).values():
        state = equal.state_of(saved)
        assert "stall" not in repr(state["recorder"]) + repr(state["hooks"])
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("bytes", "stall", "seconds"):
        points = [point.step for point in events.Scalars(f"save/{name}")]
        assert list(dict.fromkeys(points)) == [store.position(name)[0] for name in all_of(folder)]


def test_ck_a_killed_while_a_save_is_in_flight(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save = {"every_updates": 3, "every_epochs": None}
    hooks: dict[str, Hook] = {"slow": SlowWrites(0.3)}
    # The save after update 9 waits for the one after 6; then two updates are quickly made.
    ended = go(folder, At("on_step", 10, in_flight=True), hooks=hooks, save=save)
    assert ended.code == KILLED
    assert newest(folder).manifest["updates"] == 6
    # What was in flight is not counted: this is where the run stood, as far as anyone can go on.
    status = RunFolder(folder).status()
    assert (status["status"], status["updates"]) == ("running", 6)
    assert go(folder, save=save).code == 0
    assert_eq(undisturbed(save=save), folder)


def fail_to_write(path: Path, part: Any) -> Any:
    raise OSError(28, "No space left on device")


def arm_failure() -> None:
    store._write_part = fail_to_write


class SettleAt(Hook):
    """Behind the checkpoint hook: waits for the save, so that the next step sees its end."""

    order = Order.CHECKPOINT
    saves = True  # only so may it stand behind the checkpoint hook

    def on_step(self, task: Task) -> None:
        task.writer.settle()


@pytest.mark.parametrize("background", [True, False])
def test_ck_c_an_error_of_a_save_ends_the_run_at_the_next_step(
    tmp_path: Path, background: bool
) -> None:
    folder = tmp_path / "run"
    save = {"every_updates": 3, "every_epochs": None, "background": background}
    hooks = {"arm": ArmAt(12, arm_failure), "settle": SettleAt()}
    ended = go(folder, hooks=hooks, save=save)
    assert ended.code == 1
    assert "CheckpointError" in ended.output and "update_000000012-1" in ended.output
    assert "No space left" in ended.output
    made = [line["update"] for line in r1.lines(probe_of(folder), "update")]
    assert made[-1] == (13 if background else 12)
    assert RunFolder(folder).status()["status"] == "failed"
    assert newest(folder).manifest["updates"] == 9
    assert go(folder, save=save).code == 0
    assert_eq(undisturbed(save=save), folder)


@pytest.mark.parametrize("failing", [10, 30], ids=["before a phase's end", "the last save"])
def test_ck_c_no_run_is_finished_before_all_is_on_disk(tmp_path: Path, failing: int) -> None:
    folder = tmp_path / "run"
    hooks = {"arm": ArmAt(failing, arm_failure), "slow": SlowWrites(0.2)}
    ended = go(folder, hooks=hooks, save={"every_epochs": 1}, epochs=3 if failing == 30 else 1)
    assert ended.code == 1
    assert "CheckpointError" in ended.output
    assert RunFolder(folder).status()["status"] == "failed"


@pytest.mark.parametrize("workers", [0, 2])
def test_ck_a_tests_and_workers_start_while_a_save_is_in_flight(
    tmp_path: Path, workers: int
) -> None:
    """A process forked in the middle of a save waits for nothing that the thread holds."""
    folder, hooks = tmp_path / "run", {"slow": SlowWrites(0.1)}
    options: dict[str, Any] = {"test": True, "workers": workers, "augment": True, "epochs": 2}
    save = {"every_updates": 1, "keep_last": 2}
    ended = go(folder, hooks=hooks, save=save, **options)
    assert ended.code == 0, ended.output
    assert_eq(undisturbed(save=save, **options), folder)


# --- CK-b: damage ---

SAVED: dict[str, Any] = {"save": {"every_updates": 3, "every_epochs": None, "keep_last": 3}}


def interrupted(tmp_path: Path) -> Path:
    """A run killed after update 13, with checkpoints at 6, 9 and 12."""
    template = process.scratch() / "interrupted"
    if not template.exists():
        assert go(template, At("on_step", 13), **SAVED).code == KILLED
    folder = tmp_path / "run"
    shutil.copytree(template, folder)
    shutil.copy(probe_of(template), probe_of(folder))
    return folder


def flip(path: Path, place: float) -> None:
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


FILES = (MODEL, STATE, store.MANIFEST)
DAMAGES: dict[str, Callable[[Path], None]] = {
    **{f"no {file}": lambda path, file=file: (path / file).unlink() for file in FILES},
    **{f"flip {file}": lambda path, file=file: flip(path / file, 0.5) for file in FILES},
    **{f"short {file}": lambda path, file=file: cut_off(path / file) for file in FILES},
    "another fact": lambda path: replace(path / store.MANIFEST, b'"updates": 12', b'"updates": 92'),
    "first byte": lambda path: flip(path / STATE, 0.0),
    "last byte": lambda path: flip(path / MODEL, 1.0),
    "empty": lambda path: [part.unlink() for part in path.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_ck_b_a_damaged_checkpoint_is_named_and_set_aside(tmp_path: Path, damage: str) -> None:
    folder = interrupted(tmp_path)
    damaged = newest(folder).path
    DAMAGES[damage](damaged)
    checkpoints = store.Store(folder / "checkpoints")
    with pytest.raises(CheckpointError, match=damaged.name):
        store.verified(damaged)
    found = next(checkpoints.whole())
    assert found.manifest["updates"] == 9
    assert not damaged.exists()
    assert (checkpoints.folder / "set_aside" / damaged.name).is_dir()


def test_ck_b_the_one_before_a_damaged_one_is_used(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    damaged = newest(folder).path
    flip(damaged / MODEL, 0.5)
    ended = go(folder, **SAVED)
    assert ended.code == 0, ended.output
    assert damaged.name in ended.output and "damaged" in ended.output
    assert [line["update"] for line in r1.lives(probe_of(folder))[1]] == list(range(10, 31))
    assert_eq(undisturbed(**SAVED), folder)
    assert (folder / "checkpoints" / "set_aside" / damaged.name).is_dir()


def test_ck_b_two_damaged_ones_of_one_name_are_both_kept_aside(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    for _ in range(2):
        flip(newest(folder).path / MODEL, 0.5)
        assert go(folder, At("on_step", 13), **SAVED).code == KILLED
        assert newest(folder).manifest["updates"] == 12
    assert len(list((folder / "checkpoints" / "set_aside").iterdir())) == 2


def test_ck_b_no_whole_one_is_left(tmp_path: Path) -> None:
    """A run is not begun anew in silence: nothing is changed until it is asked for."""
    folder = interrupted(tmp_path)
    names = store.Store(folder / "checkpoints").names()
    for name in names:
        flip(folder / "checkpoints" / name / STATE, 0.5)
    rows = (folder / "metrics.jsonl").read_bytes()
    for _ in range(2):  # the second finds them set aside
        ended = go(folder, **SAVED)
        assert ended.code == 1
        assert "CheckpointError" in ended.output and "run.resume=never" in ended.output
        assert all(name in ended.output for name in names)
    assert sorted(os.listdir(folder / "checkpoints" / "set_aside")) == names
    assert (folder / "metrics.jsonl").read_bytes() == rows

    assert go(folder, run={"resume": "never"}, **SAVED).code == 0
    assert [line["update"] for line in r1.lives(probe_of(folder))[-1]] == list(range(1, 31))
    assert_eq(undisturbed(**SAVED), folder)
    assert sorted(os.listdir(tmp_path / "run.old-1" / "checkpoints" / "set_aside")) == names


# --- CK-c: the disk is full ---

LIMIT = 64 * 1024


def train_on_a_full_disk(folder: Path, probe: Path, **options: Any) -> Any:
    """In a new process: no file can grow over the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    return r1.train(folder, probe, **options)


def test_ck_c_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    options: dict[str, Any] = {"extra": 256, "save": {"every_updates": 4, "every_epochs": None}}
    folder = tmp_path / "run"
    assert go(folder, At("on_step", 9), **options).code == KILLED
    before = newest(folder)
    assert before.manifest["updates"] == 8
    assert before.manifest["files"][MODEL]["bytes"] > 256 * 256 * 4 > LIMIT

    ended = process.run(train_on_a_full_disk, folder, probe_of(folder), **options)
    assert ended.code == 1
    assert "CheckpointError" in ended.output and "update_000000012" in ended.output
    assert "saved update" not in ended.output
    assert newest(folder).path == before.path
    assert store.load(newest(folder), MODEL).keys() == store.load(before, MODEL).keys()
    assert set(os.listdir(folder / "checkpoints")) == {".lock", before.path.name}
    log = (folder / "log.txt").read_text()
    assert "saved update_000000004" in log and "saved update_000000012" not in log

    assert go(folder, **options).code == 0  # there is room again
    assert_eq(undisturbed(**options), folder)


# --- CK-d: which are kept ---


class Kept(Hook):
    """After the checkpoint hook at each test's end: what is there, and whether it loads."""

    order = Order.CHECKPOINT
    saves = True  # only so may it stand behind the checkpoint hook

    def __init__(self) -> None:
        self.seen: list[dict[int, str]] = []

    def on_phase_end(self, task: Task) -> None:
        if task.train or task.folder is None:
            return
        checkpoints = store.Store(task.folder.checkpoints)
        task.writer.settle()
        names = checkpoints.names()
        for name in names:
            saved = store.verified(checkpoints.folder / name)
            assert store.load(saved, MODEL) and store.load(saved, STATE)
        self.seen.append({store.position(name)[0] // r1.UPDATES: name for name in names})
        assert len(names) == len(self.seen[-1])


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_ck_d_the_newest_and_the_best_are_kept(tmp_path: Path, keep_last: int) -> None:
    kept = Kept()
    save = {"keep_last": keep_last, "keep_best": 1, "metric": "test/score"}
    task = r1.make_task(
        tmp_path / "run", epochs=5, test=True,
        test_meters={"score": Scripted([0.9, 0.5, 0.6, 0.7, 0.8])},
    )  # fmt: skip
    Trainer(task, r1.make_hooks(save=save, kept=kept)).train()
    best = [1, 2, 2, 2, 2]  # the epoch of the least score so far
    for epoch, there in enumerate(kept.seen, start=1):
        last = set(range(max(1, epoch - keep_last + 1), epoch + 1))
        assert set(there) == last | {best[epoch - 1]}
        assert len(there) <= keep_last + 1


def test_ck_d_killed_after_each_test(tmp_path: Path) -> None:
    """What is kept is known to the next process."""
    options: dict[str, Any] = {
        "epochs": 5, "test": True,
        "test_meters": {"score": Scripted([0.9, 0.5, 0.6, 0.7, 0.8])},
        "save": {"keep_best": 1, "metric": "test/score"},
    }  # fmt: skip
    folder, checkpoints = tmp_path / "run", store.Store(tmp_path / "run" / "checkpoints")
    for epoch, best in enumerate([1, 2, 2, 2, 2], start=1):
        at = At("on_phase_end", epoch * r1.UPDATES, phase="test")
        assert go(folder, at, **options).code == KILLED
        there = {store.position(name)[0] // r1.UPDATES for name in checkpoints.names()}
        assert there == {best, epoch}
        assert [entry[:2] for entry in best_of(folder)] == [[[0.9, 0.5][best > 1], best]]
    assert go(folder, **options).code == 0
    assert_eq(undisturbed(**options), folder)


def best_of(folder: Path) -> list[list[Any]]:
    """The checkpoint hook's list of the best: score, epoch, updates, name."""
    best: list[list[Any]] = equal.state_of(newest(folder))["hooks"]["checkpoint"]["best"]
    return best


def test_ck_d_another_metric_starts_a_new_ranking(tmp_path: Path) -> None:
    """hooks.checkpoint may change on a resume; scores of another metric are not compared."""
    folder = tmp_path / "run"
    first = {"keep_best": 1, "metric": "test/accuracy"}
    assert go(folder, epochs=2, test=True, save=first).code == 0
    second = {"keep_best": 1, "metric": "test/loss", "mode": "max"}
    ended = go(folder, epochs=3, test=True, save=second)
    assert ended.code == 0, ended.output
    loss = ended.value["final"]["test/loss"]
    assert [entry[:2] for entry in best_of(folder)] == [[loss, 3]]
    assert loss < best_of(reference(epochs=2, test=True, save=first))[0][0]  # would not beat it
    third = {"keep_best": 0}
    assert go(folder, epochs=4, test=True, save=third).code == 0
    assert best_of(folder) == []
    assert len(store.Store(folder / "checkpoints").names()) == 1


def test_ck_d_names_only_grow(tmp_path: Path) -> None:
    """No name is used twice, also when a run is killed between two saves of one update."""
    options: dict[str, Any] = {"test": True, "save": {"every_updates": 5, "keep_last": 1}}
    folder = tmp_path / "run"
    saved: dict[tuple[int, int], str] = {}

    def look() -> None:
        found = newest(folder)
        assert (
            saved.setdefault(found.position, found.manifest["sha256"]) == found.manifest["sha256"]
        )

    for at in (
        At("on_step", 5),
        At("on_step", 10),
        At("on_phase_end", 10),
        At("on_step", 10, phase="test", position=1),
        At("on_step", 10, signal.SIGTERM, phase="test", position=1),
        At("on_phase_end", 10, phase="test"),
        At("on_step", 11, signal.SIGTERM),
    ):
        assert go(folder, at, **options).code in (KILLED, 0)
        look()
    assert go(folder, **options).code == 0
    look()
    assert list(saved) == sorted(saved)
    assert [save for updates, save in saved if updates == 10] == [1, 2, 3]
    assert_eq(undisturbed(**options), folder)


def test_ck_d_only_what_the_run_wrote_is_removed(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)  # with checkpoints at 6, 9 and 12
    checkpoints = folder / "checkpoints"
    copied = checkpoints / store.folder_name(5, 1)
    shutil.copytree(checkpoints / store.folder_name(6, 1), copied)
    (checkpoints / "notes").write_text("mine")
    assert go(folder, save={"every_updates": 3, "every_epochs": None}).code == 0
    assert newest(folder).manifest["updates"] == 30
    kept = [".lock", "notes", copied.name, newest(folder).path.name]
    assert sorted(os.listdir(checkpoints)) == kept


@pytest.mark.parametrize("kill_at", [None, 11, 13, 22])
def test_ck_d_every_n_th_is_kept_for_ever(tmp_path: Path, kill_at: int | None) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {
        "test": True,
        "save": {"every_updates": 4, "keep_every_updates": 12, "keep_every_epochs": 2},
    }
    if kill_at is not None:
        assert go(folder, At("on_step", kill_at), **options).code == KILLED
    assert go(folder, **options).code == 0
    # Updates 12 and 24, the second epoch's end, and the newest; of each the last save.
    names = store.Store(folder / "checkpoints").names()
    assert [store.position(name)[0] for name in names] == [12, 20, 24, 30]
    assert store.position(names[1]) == (20, 3)  # at the update, at the epoch's end, after the test
    assert_eq(undisturbed(**options), folder)


class Move(Hook):
    """Moves the run's folder after update 7."""

    def on_step(self, task: Task) -> None:
        assert task.folder is not None
        if task.progress.updates == 7:
            task.folder.path.rename(task.folder.path.with_name("moved"))


def test_ck_e_a_folder_that_is_moved_during_a_save_is_not_made_anew(tmp_path: Path) -> None:
    hooks: dict[str, Hook] = {"slow": SlowWrites(1.0), "move": Move()}
    save = {"every_updates": 6, "every_epochs": None}
    ended = process.run(r1.train, tmp_path / "run", hooks=hooks, epochs=1, save=save)
    assert ended.code == 1 and "CheckpointError" in ended.output
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["moved"]


def test_ck_d_what_is_saved_before_update_1_is_not_kept_for_ever(tmp_path: Path) -> None:
    """After a test at the start: 0 is a multiple of everything, and the end of no epoch."""
    options: dict[str, Any] = {
        "test": True,
        "epochs": 2,
        "phases": {"test_at_start": True},
        "save": {"every_updates": 10, "keep_every_updates": 10, "keep_every_epochs": 1},
    }
    assert go(tmp_path, **options).code == 0
    names = store.Store(tmp_path / "checkpoints").names()
    assert [store.position(name)[0] for name in names] == [10, 20]


@pytest.mark.parametrize(
    ("save", "says"),
    [
        ({"keep_every_updates": 5}, "every_updates, which is null"),
        ({"keep_every_updates": 5, "every_updates": 2}, "every_updates, which is 2"),
        ({"keep_every_epochs": 3, "every_epochs": 2}, "every_epochs, which is 2"),
        ({"keep_every_epochs": 0}, "0 is less than 1"),
    ],
)
def test_ck_d_what_is_never_saved_cannot_be_kept(save: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        Checkpoint(**save)
    assert error.value.key.startswith("hooks.checkpoint.keep_every_")


# --- CK-e: the folder is moved ---


def updates_of(folder: Path) -> set[int]:
    """After how many updates a run's checkpoints were made."""
    return {store.position(name)[0] for name in store.Store(folder / "checkpoints").names()}


def test_ck_e_a_moved_folder_resumes_and_finishes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save": {"every_updates": 3, "keep_best": 1, "metric": "test/loss"},
                               "test": True}  # fmt: skip
    old, new = tmp_path / "old" / "run", tmp_path / "new" / "moved"
    old.parent.mkdir()
    new.parent.mkdir()
    assert go(old, At("on_step", 17), **options).code == KILLED
    shutil.move(old, new)
    shutil.move(probe_of(old), probe_of(new))
    shutil.rmtree(tmp_path / "old")

    ended = go(new, **options)
    assert ended.code == 0, ended.output
    assert not (tmp_path / "old").exists()
    assert_eq(undisturbed(**options), new)
    assert updates_of(new) == updates_of(reference(**options))


# --- CK-f: what is inside ---

LOAD = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("omegaconf", "phaseloop", "numpy_never"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Refuse())
import torch
for path in sys.argv[1:]:
    print(sorted(torch.load(path, weights_only=True)))
assert "omegaconf" not in sys.modules
"""


def test_ck_f_loads_without_omegaconf_and_without_phaseloop(tmp_path: Path) -> None:
    config = {"optimizer": {"lr": 0.1}, "hooks": {"checkpoint": {"keep_last": None}}}
    options: dict[str, Any] = {"config": config, "test": True, "optimizer_name": "adam",
                               "hooks": {"average": Average(decay=0.9)}}  # fmt: skip
    saved = newest(reference(**options))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, saved.path / MODEL, saved.path / STATE],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0.weight" in done.stdout and "optimizers" in done.stdout
    assert store.load(saved, STATE)["config"] == config


@pytest.mark.parametrize("optimizer_name", ["sgd", "adam"])
@pytest.mark.parametrize("extra", [0, 256])
def test_ck_f_size(optimizer_name: str, extra: int) -> None:
    options: dict[str, Any] = {"epochs": 1, "extra": extra, "optimizer_name": optimizer_name}
    folder = reference(**options)
    task = r1.make_task(None, **options)
    parameters = sum(p.numel() * p.element_size() for p in task.bare_model.parameters())
    optimizer = parameters * {"sgd": 1, "adam": 2}[optimizer_name]  # momentum; two moments
    size = sum(path.stat().st_size for path in newest(folder).path.iterdir())
    assert size < 2 * (parameters + optimizer) + 100_000


class Odd(Hook):
    """A hook whose state is not plain."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [{"value": self.state}]}


@pytest.mark.parametrize("kind", ["numpy number", "path", "enum", "object"])
def test_ck_f_what_could_not_be_loaded_is_not_saved(tmp_path: Path, kind: str) -> None:
    """Found at the save and named, not at the resume, when it is too late."""
    import numpy as np

    odd = {"numpy number": np.float64(0.5), "path": Path("a"), "enum": signal.SIGTERM,
           "object": Odd(None)}[kind]  # fmt: skip
    task = r1.make_task(tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match=r"hooks\.odd\.inner\.0\.value"):
        Trainer(task, r1.make_hooks(odd=Odd(odd))).train()
    assert store.Store(tmp_path / "run" / "checkpoints").names() == []


# --- CK-g: nothing in a file is run ---


class Bomb:
    """Unpickled as it would like to be, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("file", [MODEL, STATE])
def test_ck_g_a_file_that_would_run_code_is_refused(tmp_path: Path, file: str) -> None:
    folder, proof = interrupted(tmp_path), tmp_path / "proof"
    good = newest(folder)
    parts = {part: store.load(good, part) for part in (MODEL, STATE)}
    parts[file] = {**parts[file], "bomb": Bomb(proof)}
    facts = {k: v for k, v in good.manifest.items() if k not in ("files", "sha256")}
    evil = store.Store(folder / "checkpoints").write(store.folder_name(13, 1), parts, facts)
    assert store.verified(evil.path)  # sizes and checksums are right

    with pytest.raises(CheckpointError, match=file):
        store.safe_load(evil.path / file)
    ended = go(folder, **SAVED)
    assert ended.code == 1
    assert "CheckpointError" in ended.output and file in ended.output
    assert not proof.exists()
    torch.load(evil.path / file, weights_only=False)
    assert proof.exists()  # it would have run


# --- CK-h: names are the bare model's ---


def part_of_run(folder: Path, compiled: bool, stop_at: int | None) -> list[str]:
    """One process's part of R1, in this process; the names of its weights and optimizer state."""
    options = ModelOptions(compile=Compile(backend="eager") if compiled else False)
    hooks = {} if stop_at is None else {"at": At("on_step", stop_at, "stop")}
    r1.train(folder, model_options=options, hooks=hooks)
    saved = newest(folder)
    state = store.load(saved, STATE)["optimizers"]["optimizer"]["state"]
    return [*store.load(saved, MODEL), *state]


@pytest.mark.parametrize("first", [True, False], ids=["with", "without"])
def test_ck_h_saved_with_compile_loaded_without_and_the_reverse(
    tmp_path: Path, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Twice in a row; each change is one warning, and here changes no bit."""
    names = [name for name, _ in r1.network().named_parameters()]
    folder = tmp_path / "run"
    for number, stop_at in enumerate([7, 14, 21, None]):
        caplog.clear()
        compiled = first == (number % 2 == 0)
        assert part_of_run(folder, compiled, stop_at) == [*names, *names]
        warnings = [r.getMessage() for r in caplog.records if "last bits may differ" in r.message]
        change = "off -> eager" if compiled else "eager -> off"
        assert [change in text for text in warnings] == ([] if number == 0 else [True])
    part_of_run(tmp_path / "bare", False, None)
    weights = [store.load(newest(tmp_path / name), MODEL) for name in ("run", "bare")]
    assert list(equal.differ("model", *weights)) == []
