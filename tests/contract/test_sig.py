"""SIG: signals. SIGTERM and Ctrl-C stop at the next border, saved; nothing of it is left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from phaseloop import Data, Hook, Order, Task, Trainer
from phaseloop.engine.checkpoint import contents, store
from tests.rigs import process, r1
from tests.rigs.equal import assert_eq, newest, probe_of, reference, undisturbed
from tests.rigs.probes import SlowWrites
from tests.rigs.r1 import At

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL


def go(folder: Path, at: Hook | None = None, **options: Any) -> process.Ended:
    """One process of the run in ``folder``, in which ``at`` does something, or to its end."""
    hooks = {**options.pop("hooks", {}), **({} if at is None else {"at": at})}
    return process.run(r1.train, folder, probe_of(folder), hooks=hooks, **options)


def last_finished(folder: Path) -> int:
    """Number of the last update that any process of the run finished; 0: none."""
    made = r1.lines(probe_of(folder), "update")
    return max((line["update"] for line in made), default=0)


def stopped(folder: Path, ended: process.Ended, number: int) -> None:
    """It stopped because of the signal, and what it had done is saved."""
    assert ended.code == 0, ended.output
    assert ended.value["status"] == "stopped"
    assert ended.value["signal"] == number
    assert ended.value["reason"] == signal.Signals(number).name
    assert newest(folder).manifest["updates"] == last_finished(folder) == ended.value["updates"]


def finished(folder: Path, **options: Any) -> None:
    """Resumed, it comes to the same end as the undisturbed run."""
    ended = go(folder, **options)
    assert ended.code == 0, ended.output
    assert_eq(undisturbed(**options), folder)


TESTED: dict[str, Any] = {"test": True, "phases": {"test_every_updates": 3}, "augment": True}


@pytest.mark.parametrize(
    ("at", "options"),
    [
        (At("on_forward", 12, TERM), {}),
        (At("on_backward", 12, TERM), {"data": {"micro_batch_size": 1}}),
        (At("on_update", 12, INT), {}),
        (At("on_step", 12, TERM), {"save": {"every_updates": 12}}),
        (At("on_phase_end", 20, TERM, order=Order.DEFAULT), {}),
        (At("on_phase_start", 20, INT), {}),
        (At("on_forward", 12, INT, phase="test", position=1), TESTED),
        (At("on_step", 12, TERM, phase="test"), TESTED),
        (At("on_phase_end", 12, TERM, phase="test", order=Order.DEFAULT), TESTED),
    ],
    ids=lambda value: f"{value.event}-{value.phase}" if isinstance(value, At) else "",
)
def test_sig_a_in_a_batch_or_a_test(tmp_path: Path, at: At, options: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    stopped(folder, go(folder, at, **options), int(at.action))
    finished(folder, **options)


@pytest.mark.parametrize(
    "at", [At("on_start", 0, TERM), At("on_phase_start", 0, TERM), At("on_forward", 0, INT)],
    ids=lambda at: at.event,
)  # fmt: skip
def test_sig_a_before_update_1(tmp_path: Path, at: At) -> None:
    folder = tmp_path / "run"
    ended = go(folder, at)
    assert ended.code == 0, ended.output
    assert ended.value["status"] == "stopped"
    done = 1 if at.event == "on_forward" else 0  # a batch that has begun is finished
    assert last_finished(folder) == ended.value["updates"] == done
    assert len(store.Store(folder / "checkpoints").names()) == done  # nothing done, nothing to save
    finished(folder)


class SlowSave(Hook):
    """Sends the process a signal in the middle of writing a checkpoint."""

    def __init__(self, updates: int, number: int) -> None:
        self.updates = updates
        self.number = number

    def on_start(self, task: Task) -> None:
        write = store._write_part

        def write_part(file: IO[bytes], part: Any) -> Any:
            path = Path(file.name)
            updates = store.position(path.parent.name.removeprefix(".writing-"))[0]
            if path.name == contents.STATE and updates == self.updates:
                os.kill(os.getpid(), self.number)
            return write(file, part)

        store._write_part = write_part


@pytest.mark.parametrize("number", [TERM, INT])
def test_sig_a_during_a_save(tmp_path: Path, number: int) -> None:
    options: dict[str, Any] = {"save": {"every_updates": 4, "keep_last": 3}}
    folder = tmp_path / "run"
    stopped(folder, go(folder, SlowSave(12, number), **options), number)
    names = store.Store(folder / "checkpoints").names()
    # The save that was in flight is finished, and what came after it is saved too.
    there = [store.position(name)[0] for name in names]
    assert len(there) == 3 and {10, 12} < {*there} and there[-1] == last_finished(folder)
    finished(folder, **options)


class Slow(r1.Samples):
    """Sample ``index`` takes a minute to read, and says when that has begun."""

    def __init__(self, flag: Path, index: int) -> None:
        super().__init__(augment=True)
        self.flag = flag
        self.index = index

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index == self.index:
            self.flag.touch()
            for _ in range(60):  # in a C call all the time, as a slow disk is
                time.sleep(1.0)
        return sample


def train_slowly(folder: Path, flag: Path, index: int, workers: int) -> dict[str, Any]:
    """R1, in which one sample never comes; how it ended, and the workers that are left."""
    train = Data(Slow(flag, index), r1.BATCH, workers=workers)
    task = r1.make_task(folder, train=train)
    outcome = Trainer(task, r1.make_hooks(probe_of(folder))).train()
    left = [child.pid for child in multiprocessing.active_children()]
    return {**vars(outcome), "left": left}


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + process.LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("workers", "number"), [(0, TERM), (2, TERM), (2, INT)])
def test_sig_a_while_waiting_for_data(tmp_path: Path, workers: int, number: int) -> None:
    options: dict[str, Any] = {"augment": True, "workers": workers}
    whole = reference(**options)
    # The first sample of update 6: the workers look ahead, so it is asked for before.
    index = r1.lines(probe_of(whole), "update")[5]["ids"][0]
    folder, flag = tmp_path / "run", tmp_path / "flag"
    running = process.start(train_slowly, folder, flag, index, workers)
    wait_for(flag.exists)
    wait_for(lambda: probe_of(folder).exists() and last_finished(folder) == 5)
    running.send(number)
    ended = running.wait(limit=10.0)  # the contract's: a minute's sample is not waited for
    stopped(folder, ended, number)
    assert ended.value["left"] == []
    assert last_finished(folder) == 5
    finished(folder, **options)


class Interrupting:
    """In a new process: SIGTERM at the ``count``-th time that the generators are put back."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.original = np.random.set_state

    def __call__(self, state: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), TERM)
        self.original(state)


def train_interrupting(count: int, folder: Path, probe: Path, **options: Any) -> Any:
    np.random.set_state = Interrupting(count)
    return r1.train(folder, probe, **options)


@pytest.mark.parametrize(
    ("micro_batch_size", "count", "done"),
    [
        (4, 16, 15),  # one micro-batch an update: the 16th is cut short
        (1, 4 * 15 + 1, 15),  # the first of the 16th update's four
        (1, 4 * 15 + 3, 16),  # its third: an open window is closed first
    ],
)
def test_sig_a_while_the_generators_are_put_back(
    tmp_path: Path, micro_batch_size: int, count: int, done: int
) -> None:
    """Reading seeds the generators for each sample; cut short, it still gives them back."""
    options: dict[str, Any] = {"augment": True, "data": {"micro_batch_size": micro_batch_size}}
    folder = tmp_path / "run"
    ended = process.run(train_interrupting, count, folder, probe_of(folder), **options)
    stopped(folder, ended, TERM)
    assert last_finished(folder) == done
    finished(folder, **options)


def test_sig_a_at_any_instant(tmp_path: Path) -> None:
    options: dict[str, Any] = {**TESTED, "data": {"micro_batch_size": 3}, "epochs": 2}
    counted = tmp_path / "counted"
    calls = process.result(r1.count_calls, counted, probe_of(counted), **options)
    assert_eq(undisturbed(**options), counted)
    rng, folder = random.Random(7), tmp_path / "run"
    for _ in range(6):
        instant = rng.randrange(calls // 10, calls * 9 // 10)
        ended = process.run(r1.train_until, instant, TERM, folder, probe_of(folder), **options)
        assert ended.code == 0, ended.output
        if last_finished(folder):
            assert newest(folder).manifest["updates"] == last_finished(folder)
    finished(folder, **options)


def test_sig_a_stopped_again_right_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped(folder, go(folder, At("on_step", 7, TERM)), TERM)
    before = store.Store(folder / "checkpoints").names()
    for event in ("on_start", "on_resume"):
        again = go(folder, At(event, 7, TERM))
        assert again.value["status"] == "stopped" and again.value["updates"] == 7
        assert store.Store(folder / "checkpoints").names() == before
    stopped(folder, go(folder, At("on_step", 8, TERM)), TERM)
    finished(folder)


# --- what limits and surrounds it ---


class Stuck(Hook):
    """A step that never comes to its end.

    Args:
        in_flight: a save may be under way then.
    """

    def __init__(self, in_flight: bool = False) -> None:
        self.in_flight = in_flight

    def on_backward(self, task: Task) -> None:
        if task.progress.updates == 12:
            if not self.in_flight:
                task.writer.settle()
            os.kill(os.getpid(), TERM)
            time.sleep(600)


def test_sig_a_no_border_is_reached(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save": {"every_updates": 5}, "run": {"grace": 0.2}}
    folder = tmp_path / "run"
    ended = go(folder, Stuck(), **options)
    assert ended.code == 128 + TERM
    assert "run.grace" in ended.output
    assert newest(folder).manifest["updates"] == 10
    finished(folder, save={"every_updates": 5})


class LongSave(Hook):
    """A checkpoint that takes longer than the time in which a border has to be reached."""

    def on_step(self, task: Task) -> None:
        if task.progress.updates == 12:
            write = store._write_part

            def write_part(path: Path, part: Any) -> Any:
                time.sleep(0.3)
                return write(path, part)

            store._write_part = write_part
            os.kill(os.getpid(), TERM)


def test_sig_a_the_last_save_takes_its_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options: dict[str, Any] = {"run": {"grace": 0.2}}
    stopped(folder, go(folder, LongSave(), **options), TERM)
    assert last_finished(folder) == 12
    finished(folder)


class TermInSave(SlowWrites):
    """A SIGTERM comes a tenth of a second after the writing of a checkpoint has begun."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(seconds)
        self.name_of_it = name

    def on_start(self, task: Task) -> None:
        super().on_start(task)
        slow = store.Store.write

        def write(this: store.Store, name: str, *args: Any) -> store.Saved:
            if name == self.name_of_it:
                threading.Timer(0.1, os.kill, [os.getpid(), TERM]).start()
            return slow(this, name, *args)

        store.Store.write = write  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "seconds", "save"),
    [
        ("update_000000004-1", 0.6, {"every_updates": 4, "background": False}),
        ("update_000000003-1", 1.0, {"every_updates": 1}),  # the next one waits for it
        ("update_000000030-1", 1.0, {}),  # the run's last
    ],
)
def test_sig_a_a_save_that_is_waited_for_has_no_time_limit(
    tmp_path: Path, name: str, seconds: float, save: dict[str, Any]
) -> None:
    """The run stands at a border, though it has not seen it yet: cut short, updates are lost."""
    folder, hooks = tmp_path / "run", {"term": TermInSave(name, seconds)}
    save = {"every_epochs": None, **save}
    ended = process.run(
        r1.train, folder, probe_of(folder), hooks=hooks, save=save, run={"grace": 0.3}
    )
    assert ended.code == 0, ended.output
    assert ended.value["signal"] == TERM
    assert newest(folder).manifest["updates"] == last_finished(folder) == ended.value["updates"]
    finished(folder, save=save)


def stop_in_train_with_workers(folder: Path) -> list[Any]:
    hooks = {"at": At("on_step", 13, TERM)}
    outcome = r1.train(folder, None, workers=2, hooks=hooks)
    return [outcome["status"], [child.pid for child in multiprocessing.active_children()]]


def test_sig_a_no_worker_is_left_when_a_run_stops_at_a_border(tmp_path: Path) -> None:
    assert process.result(stop_in_train_with_workers, tmp_path / "run") == ["stopped", []]


def train_disturbing_workers(folder: Path, probe: Path, number: int) -> Any:
    """In a new process: every process that it starts gets a signal when it is born."""
    fork = os.fork

    def fork_and_disturb() -> int:
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), number)
        return pid

    os.fork = fork_and_disturb
    return r1.train(folder, probe, workers=2)


def test_sig_c_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = process.run(train_disturbing_workers, folder, probe_of(folder), INT)
    assert ended.code == 0, ended.output
    assert ended.value["status"] == "finished"
    assert "stopping" not in ended.output  # no worker took it for its own
    assert_eq(undisturbed(workers=2), folder)


def orphan(folder: Path, note: Path) -> None:
    """Trains with workers, writes down their ids, and is killed."""

    class Note(Hook):
        def on_step(self, task: Task) -> None:
            if task.progress.updates == 3:
                pids = [str(child.pid) for child in multiprocessing.active_children()]
                note.write_text(" ".join(pids))
                os.kill(os.getpid(), KILL)

    r1.train(folder, None, workers=2, hooks={"note": Note()})


def test_sig_a_workers_end_with_their_parent(tmp_path: Path) -> None:
    assert process.run(orphan, tmp_path / "run", tmp_path / "note").code == -KILL
    pids = [int(pid) for pid in (tmp_path / "note").read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: not any(process.alive(pid) for pid in pids))


class Twice(Hook):
    """Ctrl-C, and again at once or later."""

    order = Order.CHECKPOINT
    saves = True  # only so may it stand behind the checkpoint hook

    def __init__(self, event: str, pause: float, in_flight: bool = False) -> None:
        self.event = event
        self.pause = pause
        self.in_flight = in_flight

    def on_backward(self, task: Task) -> None:
        self._interrupt("on_backward", task)

    def on_end(self, task: Task, outcome: Any) -> None:
        self._interrupt("on_end", task)

    def _interrupt(self, event: str, task: Task) -> None:
        if event == self.event and task.progress.updates >= 12:
            self.event = ""
            if not self.in_flight:
                task.writer.settle()
            for _ in range(2):
                os.kill(os.getpid(), INT)
                time.sleep(self.pause)


@pytest.mark.parametrize("event", ["on_backward", "on_end"])
def test_sig_c_ctrl_c_twice_leaves_at_once(tmp_path: Path, event: str) -> None:
    options: dict[str, Any] = {"save": {"every_updates": 5, "keep_last": 9}}
    folder = tmp_path / "run"
    ended = go(folder, Twice(event, 0.0), **options)
    assert ended.code == 1
    assert "KeyboardInterrupt" in ended.output
    done = 10 if event == "on_backward" else 30
    assert newest(folder).manifest["updates"] == done  # no other was made
    for name in store.Store(folder / "checkpoints").names():
        store.verified(folder / "checkpoints" / name)
    status = (folder / "status.json").read_text()
    assert "KeyboardInterrupt" in status and '"failed"' in status
    finished(folder, **options)


class SlowFrom(SlowWrites):
    """Writing takes that long from the save after update ``updates`` on."""

    def __init__(self, updates: int, seconds: float) -> None:
        super().__init__(0.0)
        self.begins = updates
        self.later = seconds

    def on_step(self, task: Task) -> None:
        if task.progress.updates == self.begins:
            task.writer.settle()
            self.seconds = self.later


def test_sig_c_ctrl_c_twice_does_not_wait_for_a_save(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save": {"every_updates": 5, "every_epochs": None}}
    folder = tmp_path / "run"
    hooks: dict[str, Hook] = {"slow": SlowFrom(10, 60.0), "twice": Twice("on_backward", 0.0, True)}
    running = process.start(r1.train, folder, probe_of(folder), hooks=hooks, **options)
    ended = running.wait(limit=30.0)  # half of what the save takes
    assert ended.code == 1
    assert "KeyboardInterrupt" in ended.output
    assert newest(folder).manifest["updates"] == 5
    finished(folder, **options)


def test_sig_a_no_border_is_reached_while_a_save_is_in_flight(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "save": {"every_updates": 5, "every_epochs": None},
        "run": {"grace": 0.2},
    }
    folder = tmp_path / "run"
    hooks: dict[str, Hook] = {"slow": SlowFrom(10, 60.0), "stuck": Stuck(in_flight=True)}
    running = process.start(r1.train, folder, probe_of(folder), hooks=hooks, **options)
    assert running.wait(limit=30.0).code == 128 + TERM
    assert newest(folder).manifest["updates"] == 5
    finished(folder, save={"every_updates": 5})


def test_sig_c_ctrl_c_again_later_is_patient(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped(folder, go(folder, Twice("on_backward", 1.05)), INT)
    assert last_finished(folder) == 13
    finished(folder)


def train_under_handlers(folder: Path) -> dict[str, Any]:
    """In a new process that has handlers of its own."""
    called: list[int] = []

    def handler(number: int, frame: Any) -> None:
        called.append(number)

    signal.signal(TERM, handler)
    signal.signal(INT, handler)
    hooks = {"term": At("on_forward", 3, TERM), "int": At("on_backward", 3, INT)}
    outcome = r1.train(folder, None, hooks=hooks)
    put_back = [signal.getsignal(number) is handler for number in (TERM, INT)]
    os.kill(os.getpid(), TERM)  # not taken for the run's
    return {**outcome, "called": called, "put_back": put_back}


def test_sig_c_handlers_found_are_called_and_put_back(tmp_path: Path) -> None:
    value = process.result(train_under_handlers, tmp_path / "run")
    assert value["called"] == [TERM, INT, TERM]
    assert value["put_back"] == [True, True]
    assert value["status"] == "stopped" and value["signal"] == TERM and value["updates"] == 4


@pytest.mark.parametrize("found", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler])
def test_sig_c_the_usual_handlers_are_put_back_too(tmp_path: Path, found: Any) -> None:
    before = signal.signal(TERM, found), signal.signal(INT, found)
    try:
        r1.train(tmp_path / "run", None, epochs=1)
        assert signal.getsignal(TERM) == found and signal.getsignal(INT) == found
        with pytest.raises(r1.ToldError):
            r1.train(tmp_path / "run", None, hooks={"at": At("on_step", 11, "raise")})
        assert signal.getsignal(TERM) == found and signal.getsignal(INT) == found
    finally:
        signal.signal(TERM, before[0])
        signal.signal(INT, before[1])


def test_sig_c_in_another_thread_nothing_is_installed(tmp_path: Path) -> None:
    seen = []

    class Look(Hook):
        def on_start(self, task: Task) -> None:
            seen.append(signal.getsignal(TERM))

    before = signal.getsignal(TERM)
    thread = threading.Thread(
        target=r1.train, args=(tmp_path / "run", None), kwargs={"epochs": 1, "hooks": {"l": Look()}}
    )
    thread.start()
    thread.join()
    assert seen == [before]
    assert newest(tmp_path / "run").manifest["updates"] == r1.UPDATES
