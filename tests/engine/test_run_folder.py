"""The run's folder: one process at a time, status and small files whole, old runs put aside."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from phaseloop.engine.checkpoint import resume
from phaseloop.engine.checkpoint.store import Store
from phaseloop.engine.errors import ConfigError, PhaseloopError
from phaseloop.engine.run_folder import RunFolder, put_aside, replace_text
from tests.rigs import process


def hold(path: Path, number: int) -> None:
    """In another process: take the folder, say so, and be ended by a signal."""
    folder = RunFolder(path)
    folder.open()
    os.kill(os.getpid(), number)


def try_to_open(path: Path, resume_: str = "auto") -> str:
    """In another process: what opening the folder says."""
    folder = RunFolder(path)
    try:
        resume.open_folder(folder, resume_)
    except PhaseloopError as error:
        return str(error)
    return "opened"


def fork_and_die(path: Path) -> int:
    """In another process: take the folder, leave a child behind, and die."""
    folder = RunFolder(path)
    folder.open()
    child = os.fork()
    if child == 0:
        signal.pause()
    (path / "child").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)
    return child


@pytest.mark.parametrize("how", ["auto", "never"])
def test_a_second_process_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    folder = RunFolder(path)
    folder.open()
    folder.write_status({"status": "running"})
    said = process.result(try_to_open, path, how)
    assert f"process {os.getpid()} on {os.uname().nodename}" in said
    assert str(path) in said and "run.dir" in said
    assert folder.status()["status"] == "running"
    assert not path.with_name("run.old-1").exists()  # it was not taken away under our feet
    folder.close()
    assert process.result(try_to_open, path, how) == "opened"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_process_holds_no_lock(tmp_path: Path, number: int) -> None:
    path = tmp_path / "run"
    assert process.run(hold, path, number).code == -number
    assert process.result(try_to_open, path) == "opened"


def test_a_child_left_behind_holds_no_lock(tmp_path: Path) -> None:
    """As a loader's worker would be, for the moment until it has noticed."""
    path = tmp_path / "run"
    assert process.run(fork_and_die, path).code == -signal.SIGKILL
    child = int((path / "child").read_text())
    assert process.alive(child)
    assert process.result(try_to_open, path) == "opened"
    os.kill(child, signal.SIGKILL)


def test_opened_again_after_closing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    for _ in range(2):
        folder.open()
        folder.close()
    folder.close()


def test_a_path_that_cannot_be_a_folder_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"run\.dir: .*file"):
            RunFolder(path).open()


def test_status_is_whole_or_absent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.status() == {}
    folder.write_status({"status": "running", "updates": 3})
    assert folder.status()["updates"] == 3
    for text in ("", "{", "[]"):
        (tmp_path / "status.json").write_text(text)
        assert folder.status() == {}
    folder.write_status({"status": "finished"})
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"
    assert os.listdir(tmp_path) == ["status.json"]  # no temporary file stays


def test_two_threads_write_the_status(tmp_path: Path) -> None:
    """As when Ctrl-C comes twice: the writer of checkpoints renews it while the run ends."""
    folder = RunFolder(tmp_path)
    errors: list[BaseException] = []

    def write(status: str) -> None:
        try:
            for _ in range(200):
                folder.write_status({"status": status})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=[word]) for word in ("short", "long" * 300)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "status.json").exists():
            json.loads((tmp_path / "status.json").read_text())
    assert errors == []
    assert os.listdir(tmp_path) == ["status.json"]


def test_replacing_leaves_the_old_text_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    replace_text(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        replace_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["status.json"]


def test_putting_aside_takes_the_next_free_number(tmp_path: Path) -> None:
    path = tmp_path / "digits"
    for number in (1, 2, 3):
        path.mkdir()
        (path / str(number)).touch()
        assert put_aside(path) == tmp_path / f"digits.old-{number}"
        assert (tmp_path / f"digits.old-{number}" / str(number)).exists()
    assert not path.exists()


@pytest.mark.parametrize(
    "trace", ["status.json", "metrics.jsonl", "checkpoints/update_000000001-1"]
)
def test_never_puts_aside_whatever_a_run_has_left(tmp_path: Path, trace: str) -> None:
    """A run's checkpoints alone are enough to be taken for the run to continue."""
    path = tmp_path / "run"
    (path / trace).mkdir(parents=True)
    folder = RunFolder(path)
    resume.open_folder(folder, "never")
    assert (tmp_path / "run.old-1" / trace).exists()
    assert not (path / trace).exists()
    folder.close()


def test_never_in_a_new_folder_puts_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "notes").touch()
    folder = RunFolder(path)
    resume.open_folder(folder, "never")
    assert (path / "notes").exists()
    assert os.listdir(tmp_path) == ["run"]
    folder.close()


def save_to(path: Path, checkpoints: Path, number: int) -> None:
    """In another process: take a folder whose checkpoints lie elsewhere, and be ended."""
    RunFolder(path, str(checkpoints)).open()
    os.kill(os.getpid(), number)


def test_two_run_folders_do_not_save_to_one_folder(tmp_path: Path) -> None:
    shared = tmp_path / "disk" / "checkpoints"
    first = RunFolder(tmp_path / "first", str(shared))
    first.open()
    said = process.run(save_to, tmp_path / "second", shared, signal.SIGKILL)
    assert said.code == 1 and f"process {os.getpid()}" in said.output
    assert str(shared) in said.output and "run.checkpoints" in said.output
    first.close()
    assert process.run(save_to, tmp_path / "second", shared, signal.SIGKILL).code < 0
    assert not Store(shared).exists()  # its lock alone is no trace of a run
    resume.open_folder(RunFolder(tmp_path / "first", str(shared)), "never")
    assert sorted(os.listdir(tmp_path)) == ["disk", "first", "second"]


def save_in(path: Path) -> str:
    """In another process: what taking a run's folder says that has its checkpoints in it."""
    return try_to_open(path)


@pytest.mark.parametrize("first", ["its own", "elsewhere"])
def test_another_run_does_not_save_into_a_runs_own_checkpoints(tmp_path: Path, first: str) -> None:
    """Which of the two came first does not matter, nor whether the place is named by a link."""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    own = RunFolder(tmp_path / "a")
    other = RunFolder(tmp_path / "b", str(tmp_path / "link" / "checkpoints"))
    holder = own if first == "its own" else other
    own.open()
    own.close()
    holder.open()
    if first == "its own":
        ended = process.run(
            save_to, tmp_path / "b", tmp_path / "link" / "checkpoints", signal.SIGKILL
        )
        assert ended.code == 1 and "run.checkpoints" in ended.output
        said = ended.output
    else:
        said = process.result(save_in, tmp_path / "a")
        assert "run.dir" in said
    assert f"process {os.getpid()}" in said and "saving to" in said
    holder.close()
    assert process.result(save_in, tmp_path / "a") == "opened"


def a_past_run(path: Path, updates: int, rows: str = "") -> RunFolder:
    folder = RunFolder(path)
    path.mkdir()
    folder.write_status({"status": "running", "updates": updates})
    (path / "metrics.jsonl").write_text(rows)
    return folder


ROW, SAVE_ROW = '{"phase": "train", "update": 3}\n', '{"phase": "train", "event": "save"}\n'


@pytest.mark.parametrize("left", ["nothing", "an empty folder", "a lock", "a link to nothing"])
@pytest.mark.parametrize(("updates", "rows"), [(3, ROW), (0, ROW + SAVE_ROW)])
def test_a_run_without_its_checkpoints_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: str, updates: int, rows: str
) -> None:
    folder = a_past_run(tmp_path / "run", updates, rows)
    checkpoints = folder.path / "checkpoints"
    if left == "a link to nothing":
        checkpoints.symlink_to(tmp_path / "gone")
    elif left != "nothing":
        checkpoints.mkdir()
    if left == "a lock":
        (checkpoints / ".lock").touch()
    resume.open_folder(folder, "auto")
    folder.close()
    assert "no checkpoint to go on from: the old run is now in" in caplog.text
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == rows
    assert sorted(os.listdir(folder.path)) == [".lock", "checkpoints"]


def test_rows_without_a_readable_status_are_put_aside(tmp_path: Path) -> None:
    folder = a_past_run(tmp_path / "run", 0, ROW)
    (folder.path / "status.json").write_text("")
    resume.open_folder(folder, "auto")
    folder.close()
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == ROW


def test_a_run_killed_before_its_first_checkpoint_begins_again_where_it_is(tmp_path: Path) -> None:
    folder = a_past_run(tmp_path / "run", 0, ROW)
    (folder.path / "checkpoints").mkdir()
    resume.open_folder(folder, "auto")
    folder.close()
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("which", ["another run's", "in its own folder"])
def test_a_start_from_a_named_checkpoint_truncates_no_old_rows_either(
    tmp_path: Path, which: str
) -> None:
    folder = a_past_run(tmp_path / "run", 3, ROW + SAVE_ROW)
    inside = which == "in its own folder"
    start = (folder.path if inside else tmp_path) / "kept" / "update_000000003-1"
    start.mkdir(parents=True)
    resume.open_folder(folder, str(start))
    folder.close()
    assert start.exists()  # not moved away under the run that shall start from it
    assert (tmp_path / "run.old-1").exists() != inside


def test_where_the_checkpoints_were_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = a_past_run(tmp_path / "run", 3, ROW)
    folder.write_config({"run": {"checkpoints": str(tmp_path / "disk")}})
    resume.open_folder(folder, "auto")
    folder.close()
    assert f"had run.checkpoints={tmp_path / 'disk'}" in caplog.text
    assert (tmp_path / "run.old-1" / "metrics.jsonl").read_text() == ROW


def test_checkpoints_that_are_no_folder_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    with pytest.raises(ConfigError, match=r"run\.dir: .*checkpoints is a file"):
        resume.open_folder(RunFolder(tmp_path / "run"), "auto")
    (tmp_path / "run" / "checkpoints").unlink()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"run\.dir: .*is a link to .*gone, which is not there"):
        resume.open_folder(RunFolder(tmp_path / "run"), "auto")
    with pytest.raises(ConfigError, match=r"run\.checkpoints: .*is a link to"):
        resume.open_folder(RunFolder(tmp_path / "b", str(tmp_path / "run" / "checkpoints")), "auto")
    assert process.result(try_to_open, tmp_path / "b") == "opened"  # nobody holds it


def test_a_log_that_cannot_be_written_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "log.txt").symlink_to("/dev/full")  # every write: no space left on device
    folder.start_log()
    for _ in range(3):
        logging.getLogger("phaseloop").error("a word")
    folder.stop_log()
    told = capsys.readouterr().err
    assert told == f"{tmp_path / 'log.txt'} cannot be written: No space left on device\n"
    (tmp_path / "log.txt").unlink()
    (tmp_path / "log.txt").mkdir()
    with pytest.raises(ConfigError, match=r"run\.dir: .*log\.txt cannot be written: Is a dir"):
        folder.start_log()


def test_memory_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path / "run", f"memory://{tmp_path.name}")
    resume.open_folder(folder, "auto")
    folder.close()
    assert caplog.text.count("is the memory of this process") == 1


def test_another_rank_says_nothing_where_its_folder_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.start_log(rank=3)
    assert folder.lost == ""
    folder.path.rename(tmp_path / "elsewhere")
    folder.path.mkdir()  # another run's, by now
    logging.getLogger("phaseloop").error("too late")
    assert folder.lost == "moved"
    folder.stop_log()
    assert list(folder.path.iterdir()) == list((tmp_path / "elsewhere").iterdir()) == []


def test_another_rank_has_a_log_once_there_is_something_to_say(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.start_log(rank=3)
    logging.getLogger("phaseloop").info("nothing of note")
    assert not (folder.path / "ranks").exists()
    logging.getLogger("phaseloop").warning("look here")
    folder.stop_log()
    assert "look here" in (folder.path / "ranks" / "log-3.txt").read_text()
