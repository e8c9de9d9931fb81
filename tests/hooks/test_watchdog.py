"""Hook ``watchdog``: it speaks when nothing moves, says where, and costs a step nothing."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phaseloop import ConfigError, Data, Hook, Task, Trainer
from phaseloop.engine.events import EVENTS
from phaseloop.engine.phases import Phase
from phaseloop.hooks import watchdog
from phaseloop.hooks.watchdog import Watchdog
from tests.rigs import process, r1, ranks
from tests.rigs.equal import assert_eq, probe_of, undisturbed
from tests.rigs.probes import Break

TOO_LONG = 0.5
"""Seconds; a step of R1 takes some milliseconds."""

LIMIT = 30.0
"""Seconds that something stands still, waiting for the watchdog to have spoken of it."""

NAME = "phaseloop-watchdog"


class Hang(Hook):
    """Stands still at the end of one update, once, until the watchdog has told of it.

    Args:
        update: its number.
        stacks: files that have to be there, too.
        forever: stands still whatever is told.
    """

    only_watches = True

    def __init__(self, update: int, *stacks: Path, forever: bool = False) -> None:
        self.update = update
        self.stacks = stacks
        self.forever = forever

    def on_start(self, task: Task) -> None:
        self._told = told = threading.Event()
        tell = watchdog._Watch._tell

        def tell_and_say_so(watch: watchdog._Watch) -> None:
            tell(watch)
            told.set()

        watchdog._Watch._tell = tell_and_say_so  # type: ignore[method-assign]

    def on_step(self, task: Task) -> None:
        if task.updated and task.progress.updates == self.update and not task.resumed:
            self._told.clear()
            stand_still(lambda: self._is_over() and not self.forever)

    def _is_over(self) -> bool:
        return self._told.is_set() and all(file.exists() for file in self.stacks)


def stand_still(is_over: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT
    while not is_over() and time.monotonic() < until:
        time.sleep(0.01)


class SlowSamples(r1.Samples):
    """Reading sample 7 takes until the watchdog has written that it does, in this file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            stand_still(lambda: self.file.exists() and "waiting for" in self.file.read_text())
        return super().__getitem__(index)


def dog(**options: Any) -> Watchdog:
    return Watchdog(**{"seconds": TOO_LONG, "start_seconds": 30.0, **options})


def go(folder: Path | None, **options: Any) -> process.Ended:
    hooks = {"watchdog": options.pop("dog", dog()), **options.pop("hooks", {})}
    return process.run(train, folder, hooks=hooks, **options)


def train(folder: Path | None, hooks: dict[str, Hook], **options: Any) -> list[str]:
    """Train R1; the threads that are left."""
    probe = None if folder is None else probe_of(folder)
    Trainer(r1.make_task(folder, **options), r1.make_hooks(probe, **hooks)).train()
    return [thread.name for thread in threading.enumerate() if NAME in thread.name]


def stacks_of(folder: Path, rank: int = 0) -> Path:
    return folder / "ranks" / f"stacks-{rank}.txt"


# --- real hangs ---


def test_a_hang_in_a_hook_is_named_with_its_stack(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = go(folder, hooks={"slow": Hang(5)}, workers=1)
    assert ended.code == 0, ended.output
    assert ended.value == []  # no thread is left
    # It may have spoken before, of something else that was slow.
    said = re.search(
        r"WARNING: watchdog: no step has ended .*in hooks.slow.on_step, .*", ended.output
    )
    assert said is not None, ended.output
    assert "after update 5, in phase 'train', in hooks.slow.on_step, at " in said[0]
    assert re.search(r"test_watchdog\.py:\d+ in stand_still; the stacks", said[0])
    assert said[0].endswith(f"are in {folder / 'ranks' / 'stacks-0.txt'}")
    assert re.search(r"watchdog: it goes on, after ", ended.output)
    assert said[0].removeprefix("WARNING: ") in (folder / "log.txt").read_text()
    text = stacks_of(folder).read_text()
    assert re.search(r"rank 0, process \d+ on \S+: no step has ended", text)
    assert "in stand_still" in text and "in _walk" in text  # of the main thread, whole
    assert text.count("Thread 0x") >= 2  # and others
    assert_eq(undisturbed(), folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_for_data_counts(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "run"
    data = Data(SlowSamples(stacks_of(folder)), r1.BATCH, workers=workers)
    ended = go(folder, epochs=1, train=data)
    assert ended.code == 0, ended.output
    assert re.search(r"no step has ended for .*, waiting for data, at ", ended.output)


def test_abort_ends_the_process_and_a_restart_goes_on_exactly(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    save = {"every_updates": 5}
    options = {"dog": dog(abort=True), "hooks": {"hang": Hang(12, forever=True)}}
    started = process.start(aborted, folder, save, options)
    ended = started.wait()
    assert ended.code == 1, ended.output
    assert "leaving unsaved; the newest checkpoint stands" in ended.output
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["updates"]) == ("failed", 12)
    assert status["reason"].startswith("watchdog: ")
    assert "in stand_still" in stacks_of(folder).read_text()
    again = process.start(aborted, folder, save, options).wait()
    assert again.code == 0, again.output
    assert_eq(undisturbed(save=save), folder)


def aborted(folder: Path, save: dict[str, Any], options: dict[str, Any]) -> None:
    hooks = {"watchdog": options["dog"], **options["hooks"]}
    r1.train(folder, probe_of(folder), save=save, hooks=hooks)


class HangsOnOne(Hang):
    """Rank 1 stands still, and the others wait for it, and tell of that."""

    def on_step(self, task: Task) -> None:
        if task.backend.rank == 1:
            super().on_step(task)


def of_two(folder: Path, dog: Watchdog, forever: bool) -> str:
    stacks = [stacks_of(folder, rank) for rank in (0, 1)]
    hooks = {"watchdog": dog, "hang": HangsOnOne(5, *stacks, forever=forever)}
    return str(r1.train(folder, hooks=hooks, backend=ranks.ddp(), epochs=1)["status"])


def test_of_two_processes_each_writes_where_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, second = ranks.run(of_two, folder, dog(), False)
    assert first.value == second.value == "finished", first.output + second.output
    assert "WARNING: watchdog: no step has ended for " in first.output
    assert "watchdog" not in second.output  # what it says is in its log
    assert "in hooks.hang.on_step" in (folder / "ranks" / "log-1.txt").read_text()
    mine, other = (stacks_of(folder, rank) for rank in (0, 1))
    assert "stand_still" not in mine.read_text()  # it waits for the other
    assert "in stand_still" in other.read_text()


def test_of_two_processes_abort_ends_both_after_both_have_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = ranks.run(of_two, folder, dog(abort=True), True)
    assert ended[1].code == 1, ended[1].output
    assert ended[0].code == 1, ended[0].output
    for rank in (0, 1):
        assert stacks_of(folder, rank).exists()


def test_without_a_folder_stacks_go_to_the_standard_error() -> None:
    ended = go(None, epochs=1, hooks={"slow": Hang(5)})
    assert ended.code == 0, ended.output
    assert "in stand_still" in ended.output
    assert "the stacks of all its threads are above" in ended.output


def test_it_is_gone_after_an_error_too() -> None:
    class Fail(Hook):
        def on_step(self, task: Task) -> None:
            assert NAME in [thread.name for thread in threading.enumerate()]
            raise Break

    with pytest.raises(Break):
        Trainer(r1.make_task(None), {"dog": Watchdog(), "fail": Fail()}).train()
    assert NAME not in [thread.name for thread in threading.enumerate()]


def test_it_listens_to_nothing_that_comes_with_every_step() -> None:
    own = {event for event in EVENTS if getattr(Watchdog, event) is not getattr(Hook, event)}
    assert own == {"on_start", "on_exception", "on_end"}


# --- what is too long ---


class Watched:
    """A watch whose looks the test takes itself, and what it told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.task = r1.make_task(None)
        self.task.phase = Phase("train", True, 1, 1000)
        self.watch = watchdog._Watch(self.task, Watchdog(**options))
        self.told: list[float] = []
        monkeypatch.setattr(self.watch, "_tell", lambda: self.told.append(self.watch._quiet))
        monkeypatch.setattr(self.watch, "_say", lambda text: None)
        self.watch._look()

    def steps(self, count: int, seconds: float) -> None:
        """After so many seconds it is seen that so many steps have ended."""
        self.task.progress.steps += count
        self.quiet(seconds)

    def quiet(self, seconds: float) -> None:
        self.watch._quiet += seconds
        self.watch._look()


def test_the_limit_is_a_multiple_of_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch, factor=10, seconds=20)
    for seconds in (1, 3, 3, 500):  # median 3: one that was slow changes nothing
        seen.steps(1, seconds)
    seen.quiet(29)
    assert seen.told == []
    seen.quiet(1)
    assert seen.told == [30]
    seen.quiet(29)
    assert seen.told == [30]
    seen.quiet(1)
    seen.quiet(60)
    assert seen.told == [30, 60, 120]  # at doubling intervals
    seen.steps(1, 5)
    seen.quiet(30)
    assert seen.told == [30, 60, 120, 30]  # a new hang is told anew


def test_short_steps_have_the_least_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch, factor=10, seconds=20)
    seen.steps(1000, 5)  # 5 ms each: ten times that is nothing
    seen.quiet(19)
    assert seen.told == []
    seen.quiet(1)
    assert seen.told == [20]


def test_the_first_step_of_each_kind_of_phase_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch, factor=10, seconds=20, start_seconds=100)
    seen.quiet(99)
    assert seen.told == []
    seen.steps(1000, 0)
    seen.quiet(19)
    assert seen.told == []
    seen.task.phase = Phase("test", False, 1, 10)
    seen.quiet(0)
    seen.quiet(99)
    assert seen.told == []
    seen.quiet(1)
    assert seen.told == [100]
    seen.task.phase.position += 1
    seen.quiet(1)  # it took 101 s
    seen.task.phase = Phase("train", True, 2, 1000)
    seen.quiet(0)
    seen.quiet(20)
    assert seen.told == [100, 20]


def test_micro_batches_that_are_fetched_are_movement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch, seconds=20)
    seen.steps(1, 1)
    seen.quiet(19)
    seen.task.accumulator.taken += 1
    seen.quiet(19)
    seen.quiet(19)
    assert seen.told == []


def test_time_in_which_the_whole_process_stood_still_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Watched(monkeypatch, seconds=20)  # so it looks each second
    seen.steps(1, 1)
    times = iter([0.0, 1.0, 2.0, 5000.0, 5001.0])  # stopped for an hour and more
    waits = iter([False] * 4 + [True])
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(seen.watch._over, "wait", lambda pause: next(waits))
    seen.watch.run()
    assert seen.watch._quiet == 1 + 1 + 2 + 1
    assert seen.told == []


def test_every_rank_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    task = r1.make_task(tmp_path / "run")
    monkeypatch.setattr(task.backend, "rank", 3)
    watch = watchdog._Watch(task, Watchdog())
    watch._quiet = 200.0
    watch._tell()
    assert "rank 3" in (tmp_path / "run" / "ranks" / "stacks-3.txt").read_text()


def test_a_folder_that_is_gone_is_not_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watchdog._Watch(r1.make_task(tmp_path / "run"), Watchdog())
    watch._quiet = 200.0
    watch._tell()
    assert "are nowhere: FileNotFoundError" in caplog.text
    assert not (tmp_path / "run").exists()


def test_abort_leaves_a_run_alone_that_goes_on_after_all(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(watchdog.os, "_exit", left.append)
    seen = Watched(monkeypatch, factor=1, seconds=TOO_LONG, abort=True)
    seen.steps(1, 0.01)

    def go_on() -> None:
        seen.task.progress.steps += 1

    monkeypatch.setattr(seen.watch, "_tell", go_on)
    seen.quiet(1)
    assert left == []
    monkeypatch.setattr(seen.watch, "_tell", lambda: None)
    began = time.monotonic()
    seen.quiet(1)
    assert left == [1]
    # The other processes, which hang as long, have written theirs by then.
    assert time.monotonic() - began >= 4 * seen.watch._pause


@pytest.mark.parametrize(
    ("option", "value"), [("factor", 0.5), ("seconds", 0), ("start_seconds", -1)]
)
def test_numbers_out_of_range(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"hooks.watchdog.{option}"):
        Watchdog(**{option: value})


def test_with_several_processes_it_speaks_before_they_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog._Watch, "start", lambda self: None)
    task = r1.make_task(None)
    for options, processes, seconds in (
        ({}, 1, 180.0),
        ({}, 2, 30.0),  # three fifths of 50
        ({"seconds": 70.0}, 2, 70.0),
    ):
        monkeypatch.setattr(task.backend, "world_size", processes)
        monkeypatch.setattr(type(task.backend), "timeout", 50.0)
        dog = Watchdog(**options)
        dog.on_start(task)
        assert dog.limit(0.1) == seconds
