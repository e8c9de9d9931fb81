"""The writer: one save at a time, from a copy; its errors are told, and an exit does not wait."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from phaseloop.engine.checkpoint import store
from phaseloop.engine.checkpoint import writer as writing
from phaseloop.engine.checkpoint.store import Store, folder_name, verified
from phaseloop.engine.checkpoint.writer import Save, Writer
from phaseloop.engine.errors import CheckpointError


class Gate:
    """Holds a store's writing up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        write = store.Store.write

        def wait_and_write(this: Store, *args: Any) -> store.Saved:
            self.reached.set()
            assert self.open.wait(30)
            return write(this, *args)

        monkeypatch.setattr(store.Store, "write", wait_and_write)


def a_save(folder: Path, updates: int = 1, **options: Any) -> Save:
    return Save(Store(folder), folder_name(updates, 1), {"updates": updates}, **options)


def weights(folder: Path, updates: int = 1) -> torch.Tensor:
    saved = verified(folder / folder_name(updates, 1))
    found: torch.Tensor = store.load(saved, "model.pt")["w"]
    return found


def test_what_is_written_is_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, gate, w = Writer(), Gate(monkeypatch), torch.arange(5.0)
    plain = [1]
    writer.begin(a_save(tmp_path), {"model.pt": {"w": w, "plain": plain}})
    assert gate.reached.wait(30)
    w.zero_()
    plain.append(2)
    assert not writer.over
    gate.open.set()
    save = writer.wait()
    assert save is not None and save.saved is not None and save.error is None
    assert weights(tmp_path).tolist() == [0, 1, 2, 3, 4]
    assert store.load(save.saved, "model.pt")["plain"] == [1]
    assert writer.wait() is None  # told once


@pytest.mark.parametrize("background", [True, False])
def test_a_save_says_what_it_cost(tmp_path: Path, background: bool) -> None:
    writer, save = Writer(), a_save(tmp_path)
    (writer.begin if background else writer.write)(save, {"model.pt": {"w": torch.zeros(9)}})
    assert writer.wait() is save
    assert save.bytes == (tmp_path / save.name / "model.pt").stat().st_size
    assert save.stalled > 0 and save.seconds > 0
    assert background or save.stalled >= save.seconds


def test_both_ways_give_the_same_bytes(tmp_path: Path) -> None:
    large = torch.arange(100.0)
    parts = {"model.pt": {"w": large[:7], "tied": large[:7]}, "state.pt": {"a": [1, "b", (2.5,)]}}
    writer = Writer()
    for folder, bring in ((tmp_path / "a", writer.begin), (tmp_path / "b", writer.write)):
        bring(a_save(folder), parts)
        writer.wait()
    for file in (*parts, store.MANIFEST):
        one, other = (tmp_path / side / folder_name(1, 1) / file for side in "ab")
        assert one.read_bytes() == other.read_bytes()


def test_first_written_then_said_then_removed(tmp_path: Path) -> None:
    there: list[list[str]] = []
    checkpoints = Store(tmp_path)
    writer = Writer()
    for updates in (1, 2, 3):
        doomed = [folder_name(updates - 1, 1)]
        save = a_save(
            tmp_path, updates, doomed=doomed, then=lambda: there.append(checkpoints.names())
        )
        writer.begin(save, {"model.pt": {}})
        writer.wait()
    names = [folder_name(updates, 1) for updates in (1, 2, 3)]
    assert there == [names[:1], names[:2], names[1:]]
    assert checkpoints.names() == names[2:]


def test_an_error_is_kept_until_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, part: Any) -> Any:
        raise OSError(28, "no space left")

    monkeypatch.setattr(store, "_write_part", full)
    writer, save = (
        Writer(),
        a_save(tmp_path, doomed=["kept"], then=lambda: pytest.fail("too early")),
    )
    writer.begin(save, {"model.pt": {}})
    writer.settle()
    assert writer.over
    told = writer.wait()
    assert told is save and told.saved is None and told.bytes == 0
    with pytest.raises(CheckpointError, match=r"update_000000001-1.*no space left"):
        told.check()


def test_an_error_of_another_kind_names_the_checkpoint(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("why")

    for name, text in (("then", "is whole, but"), ("write", "could not be written")):
        writer, save = Writer(), a_save(tmp_path, then=fail if name == "then" else None)
        if name == "write":
            save.store.write = lambda *_: fail()  # type: ignore[method-assign, assignment]
        writer.begin(save, {"model.pt": {}})
        writer.wait()
        with pytest.raises(CheckpointError, match=f"{save.name} {text}.*ValueError: why") as error:
            save.check()
        assert isinstance(error.value.__cause__, ValueError)


def test_an_error_that_is_no_exception_is_told_too(tmp_path: Path) -> None:
    """asyncio's, when the loop of a file system's package ends."""

    class Cancelled(Store):
        def write(self, *_: Any) -> Any:
            raise asyncio.CancelledError("the loop is gone")

    writer, save = Writer(), Save(Cancelled(tmp_path), folder_name(1, 1), {})
    writer.begin(save, {})
    writer.settle()
    assert writer.over and writer.wait() is save
    with pytest.raises(CheckpointError, match="could not be written: CancelledError: the loop"):
        save.check()


def test_without_a_thread_nothing_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer = Writer()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="can't start new"):
        patch.setattr(threading.Thread, "start", refuse)
        writer.begin(a_save(tmp_path), {"model.pt": {}})
    assert writer.settle() is None and writer.wait() is None
    writer.begin(a_save(tmp_path), {"model.pt": {"w": torch.ones(2)}})
    writer.wait()
    assert weights(tmp_path).tolist() == [1, 1]


def test_a_save_that_is_given_up_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = threading.Event()

    def slow(path: Path, part: Any) -> Any:
        reached.set()
        while True:
            threading.Event().wait(0.01)

    monkeypatch.setattr(store, "_write_part", slow)
    writer = Writer()
    writer.begin(a_save(tmp_path), {"model.pt": {}})
    assert reached.wait(30)
    thread = writer._thread
    writer.give_up()
    assert thread is not None and not thread.is_alive()
    assert writer.wait() is None and not writer.over
    Store(tmp_path).clean()
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    writer.begin(a_save(tmp_path), {"model.pt": {"w": torch.ones(2)}})  # and it can go on
    writer.wait()
    assert weights(tmp_path).tolist() == [1, 1]


@pytest.mark.parametrize("stuck_in", ["write", "then"])
def test_what_was_given_up_says_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck_in: str
) -> None:
    """The thread is inside the system, so the exception reaches it only when that is over."""
    monkeypatch.setattr(writing, "_PATIENCE", 0.05)
    reached, go_on = threading.Event(), threading.Event()
    said: list[str] = []

    class Stuck(Store):
        def write(self, *args: Any) -> Any:
            if stuck_in == "write":
                wait()
            return None

        def remove(self, name: str) -> None:
            said.append(name)

    def wait() -> None:
        reached.set()
        try:
            go_on.wait(30)
        except BaseException:  # as though it had come a moment later
            go_on.wait(30)

    def then() -> None:
        if stuck_in == "then":
            wait()
        said.append("running")

    writer, save = Writer(), Save(Stuck(tmp_path), folder_name(1, 1), {}, doomed=["old"], then=then)
    writer.begin(save, {})
    assert reached.wait(30)
    thread = writer._thread
    writer.give_up()
    go_on.set()
    assert thread is not None
    thread.join(30)
    # What was being said when it was given up may be said to its end, and nothing after it.
    assert said in ([], ["running"] if stuck_in == "then" else [])


def test_the_thread_ends_with_the_process() -> None:
    """It must not hold up an exit: what is cut short is no checkpoint."""
    writer, started = Writer(), threading.Event()

    class Stuck(Store):
        def write(self, *args: Any) -> Any:
            started.set()
            threading.Event().wait(0.2)
            raise OSError("late")

    writer.begin(Save(Stuck(Path("nowhere")), folder_name(1, 1), {}), {})
    assert started.wait(30)
    assert writer._thread is not None and writer._thread.daemon
    writer.settle()


SLOW_DISK = """
import io, sys, tempfile, threading, time, torch
from pathlib import Path
from phaseloop.engine.checkpoint import local
from phaseloop.engine.checkpoint.store import Store, folder_name
from phaseloop.engine.checkpoint.writer import Save, Writer

begun = threading.Event()

class Slow(io.FileIO):
    def write(self, data):
        begun.set()
        time.sleep(2.0)
        return super().write(data)

local.open = lambda path, mode: Slow(path, "w")
writer = Writer()
save = Save(Store(Path(sys.argv[1])), folder_name(1, 1), {})
writer.begin(save, {"model.pt": {"w": torch.zeros(3_000_000)}})
begun.wait()
writer.give_up()
sys.exit(130)
"""


def test_a_process_ends_well_though_the_disk_is_slow_over_a_block(tmp_path: Path) -> None:
    """The thread is inside torch.save, in C++: an interpreter that ends around it crashes."""
    command = [sys.executable, "-c", SLOW_DISK, str(tmp_path / "checkpoints")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 130, ended.stderr
    checkpoints = Store(tmp_path / "checkpoints")
    assert checkpoints.names() == []
