"""Launch: real processes of tiny scripts; however they end, all of them do, and it is said once."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from phaseloop.engine.backends import forwarding, hearing, launch
from phaseloop.engine.starting import Starting
from tests.rigs import process

HEAD = """\
import os, signal, sys, time
from phaseloop.engine import outcomes
from phaseloop.tools.worker import end_with

end_with(int(os.environ["PHASELOOP_PARENT"]))
RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def here(name):
    with open(name + str(RANK), "a") as file:
        file.write(str(os.getpid()) + "\\n")

def wait_for(name, times=1):
    while not os.path.exists(name) or open(name).read().count("\\n") < times:
        time.sleep(0.01)

def deaf_to(*numbers):
    for number in numbers:
        signal.signal(number, lambda *_: here("told"))

def fail(error, code=1):
    try:
        raise error
    except Exception as error:
        import traceback
        outcomes.say(error, code, traceback.format_exc() if code == 1 else str(error))
    sys.exit(code)
"""


def launched(
    script: str, folder: Path, restarts: int = 0, to_leave: float = 5.0, patience: float = 30.0
) -> int:
    """In a new process: two processes of a script in ``folder``; the launcher's exit code.

    A file ``looks`` says that it has begun to look after them.
    """
    forwarding._TO_LEAVE, forwarding._AT_ONCE = to_leave, 30.0
    launch._PATIENCE = patience
    look = launch._Agent._monitor_workers

    def monitor(agent: launch._Agent, group: Any) -> Any:
        (folder / "looks").touch()
        return look(agent, group)

    launch._Agent._monitor_workers = monitor  # type: ignore[method-assign]
    os.chdir(folder)
    file = folder / "script.py"
    file.write_text(HEAD + textwrap.dedent(script))
    os.environ["PYTHONPATH"] = str(process.ROOT)
    starting = Starting(processes=2, restarts=restarts)
    with open("told", "a") as told:
        return launch.launch([sys.executable, str(file)], starting, tell=told.write)


def pids(folder: Path, name: str = "here") -> list[int]:
    """The processes that called ``here`` in the script."""
    files = [folder / f"{name}{rank}" for rank in (0, 1)]
    return [int(line) for file in files if file.exists() for line in file.read_text().split()]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def both_run(folder: Path) -> None:
    """Both processes have called ``here``, and the launcher looks after them."""
    wait_for(lambda: len(pids(folder)) == 2 and (folder / "looks").exists())


def none_left(folder: Path) -> None:
    assert pids(folder)
    wait_for(lambda: not any(process.alive(pid) for pid in pids(folder)))


def test_all_end_well(tmp_path: Path) -> None:
    ended = process.run(launched, "here('here')", tmp_path)
    assert (ended.code, ended.value, ended.output) == (0, 0, "")
    assert (tmp_path / "told").read_text() == ""
    assert len(pids(tmp_path)) == 2


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(3)", "rank 1 ended with exit code 3\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 died (SIGKILL)\n"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "rank 1 died (SIGTERM)\n"),
    ],
)
def test_one_dies_and_takes_the_others_down(tmp_path: Path, end: str, said: str) -> None:
    script = f"""
        here("here")
        if RANK == 1:
            wait_for("here0")
            open("fault", "w").write(str(time.time()))
            {end}
        time.sleep(600)
    """
    ended = process.run(launched, script, tmp_path)
    # Far less than the other's sleep, and the contract's limit.
    assert time.time() - float((tmp_path / "fault").read_text()) < 30.0
    assert (ended.value, ended.output) == (1, said)
    none_left(tmp_path)


def test_the_cause_is_said_and_not_what_followed_from_it(tmp_path: Path) -> None:
    """Rank 0 loses rank 1 and says so first; rank 1 takes its time to say why it ends."""
    script = """
        deaf_to(signal.SIGTERM)
        here("here")
        if RANK == 0:
            wait_for("here1")
            fail(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
        wait_for("told1")
        fail(ValueError("the first of all"))
    """
    ended = process.run(launched, script, tmp_path)
    assert ended.value == 1
    first, *traceback = ended.output.splitlines()
    assert first == "rank 1: ValueError: the first of all"
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: the first of all"
    assert "peer" not in ended.output
    assert (tmp_path / "told").read_text() == "rank 1: ValueError: the first of all"
    none_left(tmp_path)


def test_of_two_errors_the_earlier_one_is_said(tmp_path: Path) -> None:
    script = """
        deaf_to(signal.SIGTERM)
        here("here")
        if RANK == 1:
            wait_for("here0")
            fail(ValueError("early"))
        wait_for("told0")
        fail(KeyError("late"))
    """
    ended = process.run(launched, script, tmp_path)
    assert ended.output.startswith("rank 1: ValueError: early\n") and "late" not in ended.output


def test_a_wrong_configuration_is_said_once_and_never_tried_again(tmp_path: Path) -> None:
    script = """
        here("here")
        fail(ValueError("wrong configuration: no"), code=2)
    """
    ended = process.run(launched, script, tmp_path, restarts=2)
    assert (ended.value, ended.output) == (2, "wrong configuration: no\n")
    assert len(pids(tmp_path)) <= 2  # the first may have ended before the other was there


def test_all_are_started_again_after_a_failure(tmp_path: Path) -> None:
    script = """
        here("here")
        if RANK == 1 and ATTEMPT < 2:
            wait_for("here0", times=ATTEMPT + 1)
            os._exit(3)
        if ATTEMPT < 2:
            time.sleep(600)
    """
    ended = process.run(launched, script, tmp_path, restarts=3)
    said = "rank 1 ended with exit code 3\nstarting all processes again"
    assert ended.value == 0
    assert ended.output == f"{said} (1 of 3)\n{said} (2 of 3)\n"
    assert (tmp_path / "told").read_text() == ""
    assert len(pids(tmp_path)) == 6
    none_left(tmp_path)


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    ended = process.run(launched, "here('here'); os._exit(3)", tmp_path, restarts=1)
    assert ended.value == 1
    assert ended.output.count("ended with exit code 3") == 2
    assert ended.output.count("starting all processes again") == 1


def test_a_stop_that_was_agreed_is_no_failure(tmp_path: Path) -> None:
    """As after a SIGTERM to one process alone: all have stopped, and say so."""
    script = "here('here'); outcomes.leave(outcomes.Outcome(143))"
    ended = process.run(launched, script, tmp_path, restarts=1)
    assert (ended.value, ended.output) == (143, "")
    assert len(pids(tmp_path)) == 2


STOPS = """
    got = []
    def handler(number, frame):
        got.append(number)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handler)
    here("here")
    while not got:
        time.sleep(0.01)
    time.sleep(0.3)
    os.write(1, f"got {got}\\n".encode())  # at once, since the other writes there too
    outcomes.leave(outcomes.Outcome(128 + got[0]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_handed_on_once_and_the_end_waited_for(tmp_path: Path, number: int) -> None:
    running = process.start(launched, STOPS, tmp_path, restarts=1)
    both_run(tmp_path)
    running.send(number)
    ended = running.wait(30.0)
    assert ended.value == 128 + number
    assert ended.output == f"got [{int(number)}]\n" * 2


def test_a_process_that_knows_no_signal_yet_ends_by_it(tmp_path: Path) -> None:
    """As in the seconds in which modules are imported."""
    script = "signal.signal(signal.SIGINT, signal.SIG_DFL); here('here'); time.sleep(600)"
    running = process.start(launched, script, tmp_path, restarts=1)
    both_run(tmp_path)
    running.send(signal.SIGINT)
    ended = running.wait(30.0)
    assert (ended.value, ended.output) == (130, "")
    none_left(tmp_path)


def test_ctrl_c_twice_waits_for_nobody(tmp_path: Path) -> None:
    script = """
        deaf_to(signal.SIGTERM, signal.SIGINT)
        here("here")
        time.sleep(600)
    """
    running = process.start(launched, script, tmp_path, to_leave=0.2)
    both_run(tmp_path)
    running.send(signal.SIGINT)
    wait_for(lambda: len(pids(tmp_path, "told")) == 2)  # two that come at once would be one
    running.send(signal.SIGINT)
    ended = running.wait(30.0)
    assert (ended.value, ended.output) == (130, "")
    none_left(tmp_path)


def test_sigquit_ends_all_without_a_traceback(tmp_path: Path) -> None:
    running = process.start(launched, "here('here'); time.sleep(600)", tmp_path)
    both_run(tmp_path)
    running.send(signal.SIGQUIT)
    ended = running.wait(30.0)
    assert (ended.value, ended.output) == (128 + signal.SIGQUIT, "")
    none_left(tmp_path)


def test_an_error_while_processes_are_started_holds_no_signal_back_any_longer() -> None:
    handing = forwarding.Forwarding()
    with pytest.raises(OSError), handing.held_back():
        handing._handle(signal.SIGTERM, None)  # waits
        raise OSError("no more processes")
    with pytest.raises(forwarding.Stopped):  # there is nobody to hand it on to
        handing._handle(signal.SIGTERM, None)


def test_a_process_deaf_to_everything_is_ended_with_what_it_started(tmp_path: Path) -> None:
    script = """
        if RANK == 1:
            wait_for("child0")
            os._exit(3)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        here("here")
        if os.fork() == 0:
            here("child")
        time.sleep(600)
    """
    ended = process.run(launched, script, tmp_path, patience=1.0)
    assert ended.output == "rank 1 ended with exit code 3\n"
    wait_for(lambda: not any(process.alive(pid) for pid in pids(tmp_path, "child")))
    none_left(tmp_path)


def test_processes_end_with_their_launcher(tmp_path: Path) -> None:
    running = process.start(launched, "here('here'); time.sleep(600)", tmp_path)
    both_run(tmp_path)
    running.send(signal.SIGKILL)
    assert running.wait(30.0).code == -signal.SIGKILL
    none_left(tmp_path)


def count_left(folder: Path) -> list[object]:
    """In a new process: what a launch leaves behind in it."""
    before = dict(os.environ), [signal.getsignal(n) for n in range(1, 16)]
    launched("pass", folder)
    os.environ.pop("PYTHONPATH")
    before[0].pop("PYTHONPATH", None)
    return [dict(os.environ) == before[0], [signal.getsignal(n) for n in range(1, 16)] == before[1]]


def test_a_launch_leaves_nothing_behind(tmp_path: Path) -> None:
    """A multirun launches one after another."""
    assert process.result(count_left, tmp_path) == [True, True]


def seconds_to_meet(patience: float, folder: Path) -> float:
    """In a new process: how long the machines have, as torch takes it."""
    agent = launch._Agent.made(["true"], Starting(), str(folder), patience, forwarding.Forwarding())
    seconds: float = agent._rdzv_handler._settings.timeout.join.total_seconds()  # type: ignore[attr-defined]
    return seconds


def test_less_than_a_second_to_meet_is_a_second(tmp_path: Path) -> None:
    assert process.result(seconds_to_meet, 0.5, tmp_path) == 1.0


def test_machines_agree_on_a_word() -> None:
    store = PrefixStore("round", HashStore())
    assert [hearing.first_said(store, word) for word in ("one", "another")] == ["one", "one"]


def launched_at(port: int, patience: float) -> int:
    """In a new process: one of two machines, which meet at a port of this one."""
    launch._LATER = 0.5
    starting = Starting(nodes=2, rendezvous=f"localhost:{port}")
    return launch.launch([sys.executable, "-c", "pass"], starting, patience=patience)


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_port_that_something_else_has_is_no_wait_without_an_end(number: int | None) -> None:
    with socket.create_server(("localhost", 0)) as other:  # it takes what comes, and says nothing
        port = other.getsockname()[1]
        running = process.start(launched_at, port, 0.5 if number is None else 300.0)
        if number is not None:
            wait_for(lambda: bool(select.select([other], [], [], 0)[0]))
            running.send(number)
        ended = running.wait()
    if number is None:
        assert ended.code == 1
        assert f"no machine answers at localhost:{port}" in ended.output
    else:
        assert ended.code == 128 + number
