"""SIG: the terminal is closed. A run is saved and ends; under nohup it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phaseloop import Hook, Task
from phaseloop.engine.checkpoint import store
from phaseloop.engine.signals import Signals
from tests.contract.test_sig import train_disturbing_workers
from tests.rigs import cli, process, r1
from tests.rigs.equal import assert_eq, newest, probe_of, undisturbed
from tests.rigs.r1 import At

HUP = signal.SIGHUP


def go(folder: Path, at: Hook | None = None, **options: Any) -> process.Ended:
    hooks = {} if at is None else {"at": at}
    return process.run(r1.train, folder, probe_of(folder), hooks=hooks, **options)


def last_finished(folder: Path) -> int:
    return max(line["update"] for line in r1.lines(probe_of(folder), "update"))


@pytest.mark.parametrize("workers", [0, 2])
def test_sig_a_sighup_saves_and_the_resume_is_exact(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "run"
    ended = go(folder, At("on_forward", 12, HUP), workers=workers)
    assert ended.code == 0, ended.output
    assert (ended.value["status"], ended.value["signal"]) == ("stopped", HUP)
    assert ended.value["reason"] == "SIGHUP"
    assert newest(folder).manifest["updates"] == last_finished(folder) == 13
    assert go(folder, workers=workers).code == 0
    assert_eq(undisturbed(workers=workers), folder)


def train_under_nohup(folder: Path, probe: Path) -> Any:
    """In a new process, which ignores SIGHUP from its beginning."""
    signal.signal(HUP, signal.SIG_IGN)
    outcome = r1.train(folder, probe, hooks={"at": At("on_forward", 12, HUP)})
    return {**outcome, "ignored": signal.getsignal(HUP) is signal.SIG_IGN}


def test_sig_a_nohup_is_respected(tmp_path: Path) -> None:
    value = process.result(train_under_nohup, tmp_path / "run", probe_of(tmp_path / "run"))
    assert (value["status"], value["updates"], value["ignored"]) == ("finished", 30, True)


class Stuck(Hook):
    """A step that never comes to its end."""

    def on_backward(self, task: Task) -> None:
        if task.progress.updates == 12:
            os.kill(os.getpid(), HUP)
            time.sleep(600)


def test_sig_a_no_border_is_reached_after_sighup(tmp_path: Path) -> None:
    ended = go(tmp_path / "run", Stuck(), run={"grace": 0.2})
    assert ended.code == 128 + HUP
    assert "after SIGHUP (run.grace)" in ended.output


def test_sig_a_workers_leave_sighup_to_their_parent(tmp_path: Path) -> None:
    """They get it too, as all processes of a terminal do."""
    folder = tmp_path / "run"
    ended = process.run(train_disturbing_workers, folder, probe_of(folder), HUP)
    assert ended.code == 0, ended.output
    assert_eq(undisturbed(workers=2), folder)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + process.LIMIT
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_sig_a_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """With a real one: from then on every word that is printed to it is an error."""
    folder = cli.folder(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(cli.environment())
        os.execv(sys.executable, [
            sys.executable, str(cli.RUN), "config=tiny", "run.log_every=1",
            "hooks.tiny_probe.file=probe.txt", "hooks.tiny_probe.wait_at=14",
            "hooks.progress={}",
        ])  # fmt: skip
    os.set_blocking(terminal, False)

    def at_the_place() -> bool:
        with contextlib.suppress(OSError):
            os.read(terminal, 1 << 16)  # else it would wait for us
        return (folder / "probe.txt.waiting").exists()

    wait_for(at_the_place)
    os.close(terminal)
    wait_for((folder / "probe.txt.told").exists)
    (folder / "probe.txt.go").touch()
    _, status = os.waitpid(pid, 0)
    checkpoints = store.Store(folder / "runs" / "tiny" / "checkpoints")
    log = (folder / "runs" / "tiny" / "log.txt").read_text()
    assert os.waitstatus_to_exitcode(status) == 128 + HUP, log
    assert store.position(checkpoints.names()[-1])[0] == 14


class Full(logging.Handler):
    """A pipe that nobody reads: a word to it is never over."""

    def __init__(self) -> None:
        super().__init__()
        _, self.end = os.pipe()

    def emit(self, record: logging.LogRecord) -> None:
        while True:
            os.write(self.end, b"." * 65536)


def speak_into_nothing(file: Path) -> None:
    """In a new process: it has 0.1 s to leave, and hangs in its own words."""
    log = logging.getLogger("phaseloop")
    for handler in (Full(), logging.FileHandler(file)):
        log.addHandler(handler)
    signals = Signals(0.1)
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    log.error("a word")


def test_sig_a_terminal_that_takes_no_more_does_not_keep_the_process(tmp_path: Path) -> None:
    ended = process.start(speak_into_nothing, tmp_path / "log").wait(15)
    assert ended.code == 128 + signal.SIGTERM
    assert "no border was reached 0.1 s after SIGTERM" in (tmp_path / "log").read_text()
