"""What happens around a run: the clock is set, the folder moves, the disk is full or read-only at
the start, and another process wants the same folder."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from phaseloop.engine.checkpoint import store
from tests.crash import command, features, scenario
from tests.crash.command import Command
from tests.crash.faulty_fs import Plan
from tests.rigs import equal, process

pytestmark = pytest.mark.crash


def config(**hooks: Any) -> dict[str, Any]:
    """Two tests an epoch, TensorBoard, and further hooks."""
    chosen = {"tensorboard": True, "test": "half", "average": "ema", "every_updates": 3}
    made = features.config(features.settled(chosen))
    made["hooks"].update(hooks)
    return made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = command.lay_out(tmp_path_factory.mktemp("around") / "whole", config())
    code, output = command.run(folder)
    assert code == 0, output
    return folder


def equal_runs(reference: Path, folder: Path) -> None:
    """As ``assert_eq``, but for the hooks, which are others, and with what TensorBoard shows."""
    a, b = reference / "run", folder / "run"
    found = [*equal.differences(a, b), *scenario._pictures_differ(a, b)]
    assert [line for line in found if not line.startswith("state.config.hooks")] == []


# --- the clock ---


@pytest.mark.parametrize("killed_at", [5, 9])
def test_the_time_of_day_jumps(tmp_path: Path, undisturbed: Path, killed_at: int) -> None:
    """An hour back after update 3, a day forward after 7; the process that goes on is where the
    time is right again: before, or after, what has been written."""
    folder = command.lay_out(tmp_path / "a", config(crash_clock={}))
    kill = [f"+hooks.crash_at={{event: on_step, updates: {killed_at}}}"]
    assert command.run(folder, [*command.WORDS, *kill])[0] == -signal.SIGKILL
    code, output = command.run(folder)
    assert code == 0, output
    equal_runs(undisturbed, folder)


@pytest.mark.parametrize("start", [-3600, 86400])
def test_the_clock_is_set_between_two_processes(
    tmp_path: Path, undisturbed: Path, start: int
) -> None:
    """Back: TensorBoard reads files in the order of their names, which are times."""
    folder = command.lay_out(tmp_path / "a", config())
    kill = ["+hooks.crash_at={event: on_step, updates: 8}"]
    assert command.run(folder, [*command.WORDS, *kill])[0] == -signal.SIGKILL
    later = [f"+hooks.crash_clock={{start: {start}}}"]
    kill = ["+hooks.crash_at={event: on_step, updates: 13}"]
    assert command.run(folder, [*command.WORDS, *later, *kill])[0] == -signal.SIGKILL
    code, output = command.run(folder)
    assert code == 0, output
    equal_runs(undisturbed, folder)


def test_minutes_between_saves_are_not_those_of_the_day(tmp_path: Path) -> None:
    """With the clock jumping a day forward, none is due; there is the one of the end."""
    made = config(crash_clock={}, tensorboard=None)
    made["hooks"]["checkpoint"] = {"every_epochs": None, "every_minutes": 60}
    folder = command.lay_out(tmp_path / "a", made)
    code, output = command.run(folder)
    assert code == 0, output
    assert (folder / "run" / "log.txt").read_text().count("saved update") == 1


# --- the folder ---


def test_a_folder_that_is_moved_while_it_trains(tmp_path: Path, undisturbed: Path) -> None:
    """The run ends and says so; nothing grows where the folder was; it goes on where it is now."""
    moved = tmp_path / "moved"
    folder = command.lay_out(tmp_path / "a", config(crash_move={"updates": 7, "to": str(moved)}))
    code, output = command.run(folder)
    assert code == 1
    assert output.count("was moved while it trained") == 1 and "run.dir=NEW_PATH" in output
    assert "also, while ending" not in output
    assert not (folder / "run").exists()
    assert store.position(store.Store(moved / "checkpoints").names()[-1])[0] == 6
    assert list(scenario.wrong_folder(moved)) == []
    code, output = command.run(folder, [*command.WORDS, f"run.dir={moved}"])
    assert code == 0, output
    moved.rename(folder / "run")
    found = [*equal.differences(undisturbed / "run", folder / "run")]
    assert [line for line in found if not line.startswith("state.config")] == []


def test_a_folder_that_is_moved_between_two_processes(tmp_path: Path, undisturbed: Path) -> None:
    folder = command.lay_out(tmp_path / "a", config())
    kill = Plan(str(folder / "run"), do="kill", at=150)
    assert command.run(folder, faults=kill)[0] == -signal.SIGKILL
    shutil.move(folder, tmp_path / "b")
    code, output = command.run(tmp_path / "b")
    assert code == 0, output
    equal_runs(undisturbed, tmp_path / "b")


@pytest.mark.parametrize(
    ("kinds", "number", "said"),
    [
        (["mkdir"], 30, "Read-only file system"),
        (["create"], 30, "Read-only file system"),
        (["create"], 13, "Permission denied"),
        (["write"], 28, "No space left on device"),
    ],
)
def test_a_folder_that_cannot_be_written_at_the_start(
    tmp_path: Path, kinds: list[str], number: int, said: str
) -> None:
    """A sentence with the key and exit code 2, before any data is read."""
    folder = command.lay_out(tmp_path / "a", config())
    faults = Plan(str(folder / "run"), do="error", at=1, number=number, kinds=tuple(kinds))
    code, output = command.run(folder, faults=faults)
    assert code == 2, output
    assert "run.dir" in output and said in output
    assert "Traceback" not in output
    assert command.run(folder)[0] == 0


def test_a_disk_that_is_full_from_the_start(tmp_path: Path, undisturbed: Path) -> None:
    folder = command.lay_out(tmp_path / "a", config())
    code, output = command.run(folder, faults=Plan(str(folder / "run"), do="full", at=1))
    assert code == 2 and "No space left on device" in output
    assert command.run(folder)[0] == 0
    equal_runs(undisturbed, folder)


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """It is not taken for empty: the run does not begin anew where there is something."""
    folder = command.lay_out(tmp_path / "a", config())
    assert command.run(folder)[0] == 0
    before = store.Store(folder / "run" / "checkpoints").names()
    for kinds in (("list",), ("read",)):
        faults = Plan(str(folder / "run" / "checkpoints"), do="error", at=1, number=13, kinds=kinds)
        code, output = command.run(folder, faults=faults)
        assert code in (1, 2), output
        assert "Permission denied" in output
        assert store.Store(folder / "run" / "checkpoints").names() == before
        assert not (folder / "run" / "checkpoints" / "set_aside").exists()
    code, output = command.run(folder)
    assert code == 0 and "already finished" in output


# --- two at once ---


def both(folder: Path, true: bool = False) -> list[tuple[int, str]]:
    """Two command lines, started in one folder at the same instant."""
    pair = [Command(folder, true=true) for _ in range(2)]
    return [one.wait() for one in pair]


def check_pair(folder: Path, undisturbed: Path, ends: list[tuple[int, str]]) -> None:
    """One has trained, and the other was refused, or came when that was over."""
    codes = sorted(code for code, _ in ends)
    assert codes in ([0, 2], [0, 0]), ends
    for code, output in ends:
        if code == 2:
            assert "another process" in output and "run.dir" in output
        elif codes == [0, 0]:
            assert sum("already finished" in output for _, output in ends) == 1
    equal_runs(undisturbed, folder)


@pytest.mark.parametrize("number", range(2))
def test_two_started_at_once(tmp_path: Path, undisturbed: Path, number: int) -> None:
    folder = command.lay_out(tmp_path / "a", config())
    check_pair(folder, undisturbed, both(folder))


@pytest.mark.slow
def test_two_started_at_once_ten_times(tmp_path: Path, undisturbed: Path) -> None:
    for number in range(10):
        folder = command.lay_out(tmp_path / str(number), config())
        check_pair(folder, undisturbed, both(folder))


@pytest.mark.slow
def test_two_true_command_lines_at_once(tmp_path: Path, undisturbed: Path) -> None:
    folder = command.lay_out(tmp_path / "a", config())
    check_pair(folder, undisturbed, both(folder, true=True))


def test_a_killed_holder_holds_nothing_nor_do_its_workers(tmp_path: Path) -> None:
    """Killed with workers at work, and another process at once after it."""
    made = config(tensorboard=None)
    made["data"]["train"]["workers"] = 2
    made["data"]["train"]["dataset"]["seconds"] = 0.02
    folder = command.lay_out(tmp_path / "a", made)
    first = Command(folder)
    until = time.monotonic() + process.LIMIT
    while not equal.probe_of(folder / "run").exists():
        assert time.monotonic() < until
        time.sleep(0.005)
    refused = command.run(folder)
    assert refused[0] == 2, refused[1]
    assert f"process {first.pid}" in refused[1]
    first.send(signal.SIGKILL)
    code, output = command.run(folder)
    assert code == 0, output
    assert first.wait()[0] == -signal.SIGKILL
